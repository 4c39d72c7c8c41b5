"""Stand-ins for an MLflow server and an OpenTelemetry collector, which fail on request."""

import http.server
import json
import threading
import urllib.parse


class Standin:
    """`faults`: what becomes of the next requests, in order: "ok", a status as "500" or "401" (nothing stored), "cut" (no
    answer, nothing stored), "lost" (stored, no answer), "half" (half of the batch is stored, then 500), "partial" (OTLP:
    stored, and the answer names rejected points)."""

    def __init__(self, port=0):
        self.faults = []
        self.most_bytes = None  # of a body; beyond it 413
        self.requests = []  # (path, headers)
        self.after = None  # called with the number of requests so far, behind each
        self.lock = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def respond(self, status, answer):
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def take(self):
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else {}
                with outer.lock:
                    outer.requests.append((self.path, dict(self.headers)))
                    fault = outer.faults.pop(0) if outer.faults else "ok"
                    status, answer = (200, {})
                    if outer.most_bytes is not None and size > outer.most_bytes:
                        fault = "413"
                    if fault in ("ok", "lost", "half", "partial"):
                        status, answer = outer.store(self.path, body, half=fault == "half")
                if outer.after:
                    outer.after(len(outer.requests))
                if fault in ("cut", "lost"):
                    self.close_connection = True
                    self.connection.close()
                elif fault == "half":
                    self.respond(500, {"error_code": "INTERNAL_ERROR"})
                elif fault == "partial":
                    self.respond(200, {"partialSuccess": {"rejectedDataPoints": "3", "errorMessage": "too old"}})
                elif fault.isdigit():
                    self.respond(int(fault), {"message": "not this"})
                else:
                    self.respond(status, answer)

            do_GET = do_POST = take

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, request, address):
                pass

        self.server = Server(("127.0.0.1", port), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


class Mlflow(Standin):
    def __init__(self, *args):
        self.experiments, self.runs = {}, {}
        self.metrics = []  # (key, step, value, timestamp), in the order of their coming
        super().__init__(*args)

    def store(self, path, body, half):
        path, _, query = path.partition("?")
        query = dict(urllib.parse.parse_qsl(query))
        call = path.removeprefix("/api/2.0/mlflow/")
        if call == "experiments/get-by-name":
            known = self.experiments.get(query["experiment_name"])
            if known is None:
                return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such experiment"}
            return 200, {"experiment": {"experiment_id": known}}
        if call == "experiments/create":
            self.experiments[body["name"]] = str(len(self.experiments) + 1)
            return 200, {"experiment_id": self.experiments[body["name"]]}
        if call == "runs/search":
            tag = body["filter"].split("'")[1]
            found = [{"info": {"run_id": run}} for run, one in self.runs.items() if one["tags"]["cairn_run"] == tag]
            return 200, {"runs": found} if found else {}
        if call == "runs/create":
            run = f"run{len(self.runs)}"
            self.runs[run] = {"tags": {t["key"]: t["value"] for t in body["tags"]}, "status": "RUNNING", "params": {}}
            return 200, {"run": {"info": {"run_id": run}}}
        if call == "runs/get":
            latest = {}
            for key, step, value, time in self.metrics:
                latest[key] = max(latest.get(key, (-1,)), (step, value, time))
            metrics = [{"key": k, "step": s, "value": v, "timestamp": t} for k, (s, v, t) in latest.items()]
            one = self.runs[query["run_id"]]
            data = {"metrics": metrics, "params": [{"key": k, "value": v} for k, v in one["params"].items()]}
            return 200, {"run": {"info": {"run_id": query["run_id"], "status": one["status"]},
                                 "data": {key: some for key, some in data.items() if some}}}
        if call == "runs/log-batch":
            metrics = body.get("metrics", [])
            if any(self.runs[body["run_id"]]["params"].get(one["key"]) not in (None, one["value"])
                   for one in body.get("params", [])):
                return 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "a param never changes"}
            assert len(metrics) <= 1000 and len(body.get("params", [])) <= 100
            for one in metrics[:len(metrics) // 2] if half else metrics:
                self.metrics.append((one["key"], one["step"], one["value"], one["timestamp"]))
            for one in body.get("params", []):
                self.runs[body["run_id"]]["params"][one["key"]] = one["value"]
            return 200, {}
        if call == "runs/update":
            self.runs[body["run_id"]]["status"] = body["status"]
            return 200, {}
        return 404, {"error_code": "ENDPOINT_NOT_FOUND"}


class Collector(Standin):
    def __init__(self, *args):
        self.points = []  # (name, attributes, nanoseconds, value), in the order of their coming
        self.resources = []
        super().__init__(*args)

    def store(self, path, body, half):
        if path != "/v1/metrics":
            return 404, {}
        for resource in body["resourceMetrics"]:
            self.resources.append({a["key"]: a["value"]["stringValue"] for a in resource["resource"]["attributes"]})
            for scope in resource["scopeMetrics"]:
                for metric in scope["metrics"]:
                    (kind, data), = ((k, v) for k, v in metric.items() if k in ("gauge", "sum"))
                    assert kind == "gauge" or (data["aggregationTemporality"], data["isMonotonic"]) == (2, True)
                    for point in data["dataPoints"]:
                        attributes = tuple((a["key"], a["value"]["stringValue"]) for a in point.get("attributes", []))
                        self.points.append((metric["name"], attributes, int(point["timeUnixNano"]), point["asDouble"]))
        return 200, {}
