"""log.trackers: the agent keeps a process for each tracker, which sends every step once, whatever dies."""

import os
import pathlib
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import track_servers
import wandb_reader
from harness import RunTest, main


class Trackers(RunTest):
    def tracked(self, trackers, **recipe):
        path = self.recipe(**({"tp": 1, "pp": 1, "dp": 2, "sp": "false", "steps": 60, "save": 10} | recipe))
        path.write_text(path.read_text().replace("checkpoint = T.checkpoint", f"log = {{ trackers = {{ {trackers} }} }}, "
                                                                               "checkpoint = T.checkpoint"))
        return path

    def senders(self, job):
        out = []
        for pid in pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
            try:
                words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"track" in words:
                out.append(int(pid))
        return out

    def assert_each_step_once(self, server, steps):
        by_key = {}
        for key, step, value, _ in server.metrics:
            by_key.setdefault(key, []).append((step, value))
        wanted = [(step, line["loss"]) for step, line in sorted(self.metrics("run").items())]
        self.assertEqual(len(wanted), steps)
        self.assertEqual(by_key["loss"], wanted)
        for key, got in by_key.items():
            self.assertEqual([step for step, _ in got], sorted({step for step, _ in got}), key)

    def test_every_step_is_sent_once_though_service_sender_and_agent_are_killed(self):
        server = track_servers.Mlflow()
        recipe = self.tracked(f'T.mlflow "{server.url}", T.wandb {{ "llm" }}, T.prometheus "{self.folder}/run.prom"',
                              steps=100000)
        job = self.start(recipe, "run", "--set", "log.tensorboard=false")
        self.until(lambda: server.metrics, "a step at the server", job)
        senders = self.senders(job)
        self.assertEqual(len(senders), 3)
        for pid in senders:
            self.assertGreaterEqual(os.getpriority(os.PRIO_PROCESS, pid), 10)
            os.kill(pid, signal.SIGKILL)
        server.stop()
        self.until(lambda: self.events("run", "track_failed"), "news of the killed processes", job)
        job.kill_group()
        again = track_servers.Mlflow(server.port)
        self.addCleanup(again.stop)
        again.experiments, again.runs, again.metrics = server.experiments, server.runs, server.metrics
        again.faults = ["500", "ok", "cut"]
        last = self.last_step("run")
        self.train(recipe, "run", "--set", "log.tensorboard=false", "--kill", f"1@{last + 20}", "--stop-at", last + 40)
        self.assert_each_step_once(again, last + 40)
        self.assertEqual([one["status"] for one in again.runs.values()], ["FINISHED"])
        (file,) = (self.folder / "run" / "wandb").glob("offline-run-*/run-*.wandb")
        got = wandb_reader.read(file)
        self.assertEqual([(row["_step"], row["loss"]) for row in got["history"] if "loss" in row],
                         [(step, line["loss"]) for step, line in sorted(self.metrics("run").items())])
        self.assertEqual((got["exit"], got["run"]["project"]), ([0], "llm"))
        self.assertIn(f'"}} {last + 40}\n', (self.folder / "run.prom").read_text())

    def test_a_service_that_stays_away_costs_the_end_no_more_than_finish_and_no_bit(self):
        self.train(self.recipe(steps=6, tp=1, pp=1, dp=2, sp="false"), "plain")
        recipe = self.tracked('T.otlp { "http://127.0.0.1:9", finish = "300ms" }', steps=6)
        job = self.train(recipe, "run")
        self.assertIn("warning: log.trackers[1]: POST http://127.0.0.1:9/v1/metrics", job.output())
        self.assertIn("not everything is sent to log.trackers[1] (given up after", job.output())
        self.assertEqual(len(self.events("run", "track_failed")), 1)
        self.assertEqual([line["loss"] for _, line in sorted(self.metrics("run").items())],
                         [line["loss"] for _, line in sorted(self.metrics("plain").items())])
        self.assertEqual(self.contents("run", 6)[1], self.contents("plain", 6)[1])
        server = track_servers.Collector()
        self.addCleanup(server.stop)
        self.cairn("track", "run", "--otlp", server.url)
        self.assertEqual([value for name, _, _, value in server.points if name == "cairn.step"], [1, 2, 3, 4, 5, 6])


if __name__ == "__main__":
    main()
