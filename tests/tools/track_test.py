"""cairn track on run folders: each step once and in order, whatever services, connections and processes do."""

import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import track_servers
import wandb_reader
from program import ProgramTest, main


class Track(ProgramTest):
    def run_folder(self, steps, name="run", ended=True):
        os.makedirs(self.path(f"{name}/checkpoints"))
        self.write(f"{name}/run.json", json.dumps({"id": "0123-ab", "name": name}))
        self.steps = {}
        self.lines(steps, name, header='{"run":"0123-ab","schema":1}\n')
        if ended:
            self.add(f"{name}/events.jsonl", json.dumps({"event": "end", "time": 1e9, "exit_code": 0}, separators=(",", ":")) + "\n")

    def add(self, name, text):
        with open(self.path(name), "a") as f:
            f.write(text)

    def lines(self, steps, name="run", header=""):
        text = header
        for step in steps:
            values = {"loss": 1 / step, "lr": 1e-3, "source_loss": {"web": 2 / step}, "split_ms": {"forward": 5.5}}
            text += json.dumps({"step": step, "time": 1000.0 + step, **values}) + "\n"
            self.steps.setdefault(step, {"loss": 1 / step, "lr": 1e-3, "source_loss/web": 2 / step, "split_ms/forward": 5.5})
        self.add(f"{name}/metrics.jsonl", text)

    def server(self, kind, *args):
        out = kind(*args)
        self.addCleanup(out.stop)
        return out

    def recipe(self):
        """A recipe of more parameters than one request takes."""
        self.write("run/recipe.resolved.json", json.dumps({"name": "tiny", "many": {f"p{k}": k for k in range(150)}}))
        return {"name": "tiny", **{f"many.p{k}": str(k) for k in range(150)}}

    def state_file(self, run="run"):
        (name,) = (n for n in os.listdir(self.path(f"{run}/tracking")) if n.endswith(".json"))
        return self.path(f"{run}/tracking/{name}")

    def assert_mlflow(self, server, steps, ends=None):
        """Every value of every step once, and each name's steps ascending; `ends`: steps that the event "end" has."""
        by_key = {}
        for key, step, value, time in server.metrics:
            self.assertEqual(time, 1e12 if key == "events/end" else (1000 + step) * 1000)
            by_key.setdefault(key, []).append((step, value))
        self.assertEqual(by_key.pop("events/end"), [(step, 1) for step in ends or [steps[-1] + 1]])
        self.assertEqual(sorted(by_key), ["loss", "lr", "source_loss/web", "split_ms/forward"])
        for key, got in by_key.items():
            self.assertEqual(got, [(step, self.steps[step][key]) for step in steps], key)

    def test_mlflow_has_each_step_once_whatever_becomes_of_requests(self):
        self.run_folder(range(1, 901))
        params = self.recipe()
        server = self.server(track_servers.Mlflow)
        server.faults = ["500", "ok", "lost", "ok", "ok", "ok", "ok", "lost", "ok", "ok", "half", "ok", "lost", "ok", "cut", "500"]
        done = self.cairn("track", "run", "--mlflow", server.url, "--project", "exp",
                          env={"MLFLOW_TRACKING_TOKEN": "s3cret"})
        self.assertEqual(server.faults, [])
        self.assertIn("mlflow: sent up to step 900", done.stdout)
        self.assertIn("it is tried again", done.stderr)
        self.assert_mlflow(server, range(1, 901))
        self.assertEqual(list(server.experiments), ["exp"])
        (run, one), = server.runs.items()
        self.assertEqual((one["status"], one["tags"]["cairn_run"]), ("FINISHED", "0123-ab"))
        self.assertEqual(one["params"], params)
        self.assertTrue(all(h["Authorization"] == "Bearer s3cret" for _, h in server.requests))
        self.assertNotIn("s3cret", done.stdout + done.stderr)
        # Again: nothing new. The run continues: the rest, in the same run.
        self.assertIn("nothing new", self.cairn("track", "run", "--mlflow", server.url, "--project", "exp").stdout)
        self.assertEqual(one["status"], "FINISHED")
        self.add("run/metrics.jsonl", '{"resumed_at":890}\n')
        self.lines(range(891, 951))
        self.cairn("track", "run", "--mlflow", server.url, "--project", "exp")
        self.assert_mlflow(server, range(1, 951), ends=[901, 951])
        self.assertEqual((len(server.runs), one["status"]), (1, "FINISHED"))
        os.remove(self.state_file())
        self.cairn("track", "run", "--mlflow", server.url, "--project", "exp")  # what was lost here is known there
        self.assert_mlflow(server, range(1, 951), ends=[901, 951])
        self.assertEqual((one["status"], one["params"]), ("FINISHED", params))

    def test_a_damaged_file_of_a_tracker_is_set_aside_and_the_service_is_asked(self):
        self.run_folder(range(1, 301))
        server = self.server(track_servers.Mlflow)
        args = ["track", "run", "--mlflow", server.url]
        self.cairn(*args)
        state = self.state_file()
        with open(state) as f:
            known = json.load(f)
        for damaged in ["", "{", "[]", json.dumps({**known, "note": "x"}), json.dumps({**known, "position": {"step": -1}})]:
            with open(state, "w") as f:
                f.write(damaged)
            said = self.cairn(*args).stderr
            self.assertIn(f"the file is now {os.path.basename(state)}.damaged", said)
            with open(state + ".damaged") as f:
                self.assertEqual(f.read(), damaged)
            self.assert_mlflow(server, range(1, 301))
            with open(state) as f:
                self.assertEqual(json.load(f), known)
        self.assertEqual([one["status"] for one in server.runs.values()], ["FINISHED"])

    def test_a_batch_that_mlflow_refuses_blocks_no_later_one(self):
        self.run_folder(range(1, 901))
        server = self.server(track_servers.Mlflow)
        server.faults = 6 * ["ok"] + ["400", "403"]  # behind those of the opening, and a batch
        said = self.cairn("track", "run", "--mlflow", server.url).stderr
        self.assertIn("mlflow: warning: POST", said)
        self.assertIn("HTTP 403", said)  # refuses the sender, and not the batch: it comes again
        self.assertEqual([step for key, step, _, _ in server.metrics if key == "loss"], [*range(1, 201), *range(401, 901)])

    def test_mlflow_has_each_step_once_though_the_sender_is_killed_at_any_request(self):
        self.run_folder(range(1, 1601))
        params = self.recipe()
        server = self.server(track_servers.Mlflow)
        args = [self.program, "track", "run", "--mlflow", server.url]
        kills = 0
        for number in range(1, 40):
            server.requests.clear()
            begun, process = threading.Event(), None

            def after(count):
                begun.wait(10)
                if count == number:
                    process.kill()

            server.after = after
            process = subprocess.Popen(args, cwd=self.folder.name, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            begun.set()
            code = process.wait(60)
            kills += code == -signal.SIGKILL
            if code == 0:
                break
        self.assertEqual(code, 0)
        self.assertGreater(kills, 5)
        self.assert_mlflow(server, range(1, 1601))
        (run, one), = server.runs.items()
        self.assertEqual((one["status"], one["params"]), ("FINISHED", params))

    def test_otlp_has_each_point_once(self):
        self.run_folder(range(1, 501), ended=False)
        self.add("run/events.jsonl", '{"event":"saved","time":1003.5}\n{"event":"end","exit_code":0,"time":1e9}\n')
        server = self.server(track_servers.Collector)
        server.faults = ["500", "ok", "lost", "cut"]
        done = self.cairn("track", "run", "--otlp", server.url,
                          env={"OTEL_EXPORTER_OTLP_HEADERS": "api-key=s%3Dcret, x-team = a "})
        self.assertNotIn("cret", done.stdout + done.stderr)
        self.assertEqual({(h["api-key"], h["x-team"]) for _, h in server.requests}, {("s=cret", "a")})
        self.assertEqual(server.resources[0], {"service.name": "cairn", "cairn.run.name": "run", "cairn.run.id": "0123-ab"})
        got = {}
        for name, attributes, time, value in server.points:
            series = got.setdefault((name, attributes), {})
            self.assertEqual(series.setdefault(time, value), value)  # sent twice, where the answer was lost: the same
        times = [(1000 + step) * 10**9 for step in range(1, 501)]
        self.assertEqual(list(got["cairn.loss", ()].items()), [(t, 1 / (k + 1)) for k, t in enumerate(times)])
        self.assertEqual(list(got["cairn.source_loss", (("source", "web"),)]), times)
        self.assertEqual(got["cairn.split_seconds", (("phase", "forward"),)][times[0]], 5.5e-3)
        self.assertEqual(list(got["cairn.step", ()].values()), list(range(1, 501)))
        self.assertEqual(got["cairn.events_total", (("event", "saved"),)], {times[3]: 1})
        self.assertEqual(got["cairn.events_total", (("event", "end"),)], {10**18: 1})

    def test_points_that_a_collector_refuses_block_no_later_ones(self):
        self.run_folder(range(1, 901), ended=False)
        server = self.server(track_servers.Collector)
        server.faults = ["ok", "400", "partial", "404"]
        said = self.cairn("track", "run", "--otlp", server.url).stderr
        self.assertEqual(said.count("warning"), 1)
        self.assertIn("HTTP 400", said)
        steps = [value for name, _, _, value in server.points if name == "cairn.step"]
        self.assertEqual(steps, [*range(1, 201), *range(401, 601), *range(801, 901)])
        self.assertIn("nothing new", self.cairn("track", "run", "--otlp", server.url).stdout)
        rejecting = self.server(track_servers.Collector)
        rejecting.faults = ["partial"]
        said = self.cairn("track", "run", "--otlp", rejecting.url).stderr
        self.assertIn("has rejected 3 data points: too old", said)
        self.assertEqual([value for name, _, _, value in rejecting.points if name == "cairn.step"], list(range(1, 901)))
        small = self.server(track_servers.Collector)
        small.most_bytes = 20000
        self.assertNotIn("warning", self.cairn("track", "run", "--otlp", small.url).stderr)
        self.assertEqual([value for name, _, _, value in small.points if name == "cairn.step"], list(range(1, 901)))

    def test_a_service_that_says_no_is_named_and_one_that_is_away_is_waited_for(self):
        self.run_folder(range(1, 11))
        server = self.server(track_servers.Mlflow)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        process = subprocess.Popen([self.program, "track", "run", "--mlflow", f"http://127.0.0.1:{port}"],
                                   cwd=self.folder.name, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.kill)
        self.assertIn("it is tried again", process.stderr.readline())
        busy = self.cairn("track", "run", "--mlflow", f"http://127.0.0.1:{port}", code=73)
        self.assertIn("another process sends this already", busy.stderr)
        late = self.server(track_servers.Mlflow, port)
        self.assertEqual(process.wait(60), 0)
        process.stdout.close()
        process.stderr.close()
        self.assert_mlflow(late, range(1, 11))
        server.faults = ["401"]
        said = self.cairn("track", "run", "--mlflow", server.url).stderr
        self.assertIn("HTTP 401", said)
        self.assertIn("is no URL", self.cairn("track", "run", "--otlp", "host:4318", code=2).stderr)
        for kind, variable in [("otlp", "OTEL_EXPORTER_OTLP_HEADERS"), ("mlflow", "MLFLOW_TRACKING_TOKEN")]:
            said = self.cairn("track", "run", f"--{kind}", "http://me:s3cret@host", code=2).stderr
            self.assertIn(f"{variable} in the environment", said)
            self.assertNotIn("s3cret", said)
        self.assertIn('end in ".prom"', self.cairn("track", "run", "--prometheus", "run.txt", code=2).stderr)
        self.assertIn("recipe.resolved.json: No such file", self.cairn("track", "run", code=2).stderr)
        self.assertIn("is this a run folder?", self.cairn("track", "nowhere", "--wandb", "w", code=2).stderr)

    def wandb_file(self):
        (folder,) = os.listdir(self.path("w"))
        return self.path(f"w/{folder}/{folder.rsplit('-', 1)[1].join(['run-', '.wandb'])}")

    def test_wandb_has_each_step_once_though_the_writer_is_killed_at_any_time(self):
        self.run_folder(range(1, 20001), ended=False)
        self.write("run/recipe.resolved.json", '{"name":"tiny","optimizer":{"peak_lr":0.001}}')
        draw = random.Random(3)
        args = [self.program, "track", "run", "--wandb", "w", "--project", "llm", "--entity", "us"]
        kills = 0
        for _ in range(12):
            process = subprocess.Popen(args, cwd=self.folder.name, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                process.wait(draw.uniform(0.02, 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                kills += process.wait() == -signal.SIGKILL
        self.assertGreater(kills, 2)
        with open(self.path("run/events.jsonl"), "w") as f:
            f.write('{"event":"end","time":1e9,"exit_code":0}\n')
        self.cairn(*args[1:])
        got = wandb_reader.read(self.wandb_file())
        self.assertEqual(got["history"].pop(), {"_step": 20001, "_timestamp": 1e9, "events/end": 1})
        self.assertEqual([row["_step"] for row in got["history"]], list(range(1, 20001)))
        for row in got["history"]:
            step = row.pop("_step")
            self.assertEqual(row.pop("_timestamp"), 1000 + step)
            self.assertEqual(row, self.steps[step])
        self.assertEqual(got["exit"], [0])
        self.assertEqual({k: got["run"][k] for k in ("id", "project", "entity", "name")},
                         {"id": "cairn0123ab", "project": "llm", "entity": "us", "name": "run"})
        self.assertEqual(got["run"]["config"]["optimizer"], {"peak_lr": 0.001})
        with open(self.wandb_file(), "ab") as f:
            f.write(b"x" * 100000)  # as a killed process leaves it that had no time to note it
        # The run continues: its end stands behind its steps again.
        self.lines(range(20001, 20010))
        self.cairn(*args[1:])
        got = wandb_reader.read(self.wandb_file())
        self.assertEqual([row["_step"] for row in got["history"] if "loss" in row], list(range(1, 20010)))
        self.assertEqual(got["history"][-1], {"_step": 20010, "_timestamp": 1e9, "events/end": 1})
        self.assertEqual(got["exit"], [0])

    def test_wandb_begins_a_file_anew_that_was_cut_or_removed(self):
        self.run_folder(range(1, 101))
        args = ["track", "run", "--wandb", "w"]
        self.cairn(*args)
        for damage in [lambda: os.truncate(self.wandb_file(), 100), lambda: os.remove(self.wandb_file()),
                       lambda: shutil.rmtree(self.path("w")), lambda: self.write(self.state_file(), "{")]:
            damage()
            self.assertIn("warning", self.cairn(*args).stderr)
            got = wandb_reader.read(self.wandb_file())
            self.assertEqual(([row["_step"] for row in got["history"]], got["exit"]), (list(range(1, 102)), [0]))

    def test_a_copy_of_a_run_writes_no_file_of_the_original(self):
        for to in ["run/wandb", "w"]:
            self.run_folder(range(1, 11), ended=False)
            args = ["--wandb", os.path.abspath(self.path(to)), "--project", "p"]
            self.cairn("track", "run", *args)
            (file,) = pathlib.Path(self.path(to)).glob("offline-run-*/*.wandb")
            before = file.read_bytes()
            shutil.copytree(self.path("run"), self.path("copy"))
            self.lines(range(11, 13), "copy")
            self.cairn("track", "copy", *args)
            self.assertEqual(file.read_bytes(), before)
            (own,) = {*pathlib.Path(self.folder.name).glob("**/offline-run-*/*.wandb")} - {file}
            self.assertEqual([row["_step"] for row in wandb_reader.read(own)["history"]], list(range(1, 13)))
            self.lines(range(11, 12))
            self.cairn("track", "run", *args)
            self.assertEqual([row["_step"] for row in wandb_reader.read(file)["history"]], list(range(1, 12)))
            shutil.rmtree(self.path("copy"))
            # A run that was moved keeps its file.
            os.rename(self.path("run"), self.path("copy"))
            self.lines(range(12, 14), "copy")
            self.cairn("track", "copy", *args)
            moved = file if to == "w" else pathlib.Path(str(file).replace("/run/", "/copy/"))
            self.assertEqual([row["_step"] for row in wandb_reader.read(moved)["history"]], list(range(1, 14)))
            shutil.rmtree(self.path("copy"))

    def test_prometheus_has_the_newest_step(self):
        self.run_folder(range(1, 4))
        self.add("run/metrics.jsonl", json.dumps({"step": 4, "time": 1004.25, "loss": 0.5, "valid_loss": 2.0}) + "\n")
        self.cairn("track", "run", "--prometheus", "run.prom")
        with open(self.path("run.prom")) as f:
            text = f.read()
        labels = 'run="run",run_id="0123-ab"'
        for line in ["# TYPE cairn_loss gauge", f"cairn_loss{{{labels}}} 0.5", f"cairn_valid_loss{{{labels}}} 2",
                     f'cairn_source_loss{{{labels},source="web"}} {2 / 3}', f"cairn_step{{{labels}}} 4",
                     f"cairn_exit_code{{{labels}}} 0", f"cairn_last_step_timestamp_seconds{{{labels}}} 1004.25",
                     f'cairn_split_seconds{{{labels},phase="forward"}} 0.0055']:
            self.assertIn(line + "\n", text)
        families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        self.assertEqual(sorted(set(families)), sorted(families))

    def test_follow_ends_with_the_run(self):
        self.run_folder([1, 2])
        self.assertIn("sent up to step 2", self.cairn("track", "run", "--wandb", "w", "--follow").stdout)


if __name__ == "__main__":
    main()
