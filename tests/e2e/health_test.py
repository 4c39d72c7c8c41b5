"""People and monitoring on other machines see a run: `cairn hosts`, /healthz and /metrics of each agent."""

import http.client
import json
import re
import signal

from harness import HostsTest, main


class Health(HostsTest):
    def port_of(self, job):
        found = self.until(lambda: re.search(r"health and metrics: port (\d+)", job.output()), "the port", job)
        return int(found.group(1))

    @staticmethod
    def get(port, path, token=None):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def metrics_of(self, port, token):
        """Prometheus' text, each sample with its type before it."""
        status, page = self.get(port, "/metrics", token)
        self.assertEqual(status, 200, page)
        lines = page.splitlines()
        out = {}
        for line in lines:
            if line.startswith("#"):
                continue
            name, value = line.split(" ")
            self.assertRegex(name, r"^cairn_[a-z_]+$")
            self.assertTrue(any(re.match(rf"# TYPE {name} (gauge|counter)$", other) for other in lines), name)
            out[name] = float(value)
        return out

    def said(self, *args, code=0):
        done = self.cairn(*args, code=code)
        return (done.stdout + done.stderr).decode()

    def hosts_of(self, run):
        return json.loads(self.said("hosts", self.folder / run, "--json"))

    def test_a_run_of_two_hosts_is_seen_from_its_start_to_its_end(self):
        recipe = self.recipe(steps=100000, save=10, tp=2, pp=1, dp=2)
        token = self.folder / "token"
        token.write_text("secret\n")
        jobs = self.start_hosts(recipe, "run", 2, 2, "--http", "127.0.0.1:0", "--http-token", token)
        leader, follower = (self.port_of(job) for job in jobs)
        self.until(lambda: self.events("run", "saved"), "a save", jobs[0])
        self.until_step("run", 20, jobs[0])

        self.assertEqual(self.get(leader, "/healthz", "secret"), (200, "training\n"))
        self.until(lambda: self.get(follower, "/healthz", "secret") == (200, "training\n"), "the follower", jobs[1])
        self.assertEqual(self.get(leader, "/healthz")[0], 401)
        seen = self.until(lambda: (found := self.metrics_of(leader, "secret"))["cairn_hosts"] == 2 and found,
                          "the other host's word", jobs[0])  # a host counts from its first beat on
        self.assertGreaterEqual(seen["cairn_step"], 20)
        self.assertEqual((seen["cairn_steps"], seen["cairn_hosts"], seen["cairn_places"]), (100000, 2, 2))
        self.assertEqual((seen["cairn_leads"], seen["cairn_healthy"], seen["cairn_restarts_total"]), (1, 1, 0))
        self.assertGreaterEqual(seen["cairn_saves_total"], 1)
        self.assertGreaterEqual(seen["cairn_checkpoint_step"], 10)
        self.assertLess(seen["cairn_checkpoint_age_seconds"], 600)
        step = int(seen["cairn_step"])
        self.until(lambda: step in self.metrics("run"), "the line of that step", jobs[0])
        line = self.metrics("run")[step]
        self.assertAlmostEqual(seen["cairn_loss"], line["loss"], places=4)
        self.assertAlmostEqual(seen["cairn_step_seconds"] * 1000, line["step_ms"], places=2)
        self.assertEqual(self.metrics_of(follower, "secret")["cairn_leads"], 0)

        now = self.until(lambda: (seen := self.hosts_of("run"))["step"] >= step and seen, "its file", jobs[0])
        self.assertEqual([(one["index"], one["place"], one["state"]) for one in now["hosts"]],
                         [(0, 0, "training"), (1, 1, "training")])
        self.assertEqual((now["leader"], now["epoch"], now["phase"]), (0, 1, "training"))
        self.assertLess(now["hosts"][1]["heard_s"], 3)
        self.assertRegex(self.said("hosts", self.folder / "run"), r"(?m)^ +1 +1 .* training$")

        jobs[1].signal(signal.SIGKILL)
        self.until(lambda: self.hosts_of("run")["hosts"][1]["state"] == "away", "the loss", jobs[0])
        self.assertEqual(self.metrics_of(leader, "secret")["cairn_hosts"], 1)
        jobs[1] = self.start_host(recipe, "run", 1, 2, 2, name="again")
        self.until(lambda: self.hosts_of("run")["hosts"][1]["state"] == "training", "its return", jobs[0])
        self.assertEqual(self.metrics_of(leader, "secret")["cairn_restarts_total"], 1)
        jobs[0].signal(signal.SIGTERM)
        self.finish_all(jobs)
        after = self.hosts_of("run")
        self.assertEqual((after["phase"], after["exit_code"]), ("ended", 0))
        self.assertIn("ended with exit code 0", self.said("hosts", self.folder / "run", "--follow"))

    def test_one_host_has_them_too_and_what_others_reach_needs_a_token(self):
        recipe = self.recipe(steps=100000, tp=1, pp=1, dp=1, sp="false")
        for word in ("0.0.0.0:0", "127.0.0.1", "localhost:1", "127.0.0.1:99999"):
            self.assertIn("--http", self.said("train", recipe, "--run", self.folder / "no", "--http", word, code=2))
        job = self.start(recipe, "one", "--http", "127.0.0.1:0")
        port = self.port_of(job)
        self.until_step("one", 5, job)
        self.assertEqual(self.get(port, "/healthz"), (200, "training\n"))
        self.assertGreaterEqual(self.metrics_of(port, None)["cairn_step"], 5)
        self.assertEqual(self.get(port, "/other")[0], 404)
        self.assertIn("one host; pid", self.said("hosts", self.folder / "one"))
        job.signal(signal.SIGTERM)
        self.finish(job)
        self.assertIn("one host; no agent has it now", self.said("hosts", self.folder / "one"))
        self.assertIn("no run folder", self.said("hosts", self.folder / "none", code=2))


if __name__ == "__main__":
    main()
