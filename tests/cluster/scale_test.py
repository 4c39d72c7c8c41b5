"""What many hosts cost each other while they train: nobody but the leader touches the folder that all share, and the
others' consoles are silent. What a thousand agents cost the leader is bench/leader_scale.cc's.

CAIRN_SCALE_HOSTS=N: so many hosts with a rank each (default 10)."""

import ctypes
import os
import struct
import time

from bed import main
from train_test import ListedBed

HOSTS = int(os.environ.get("CAIRN_SCALE_HOSTS", "10"))
IN_ACCESS, IN_MODIFY, IN_OPEN, IN_MOVED_TO = 0x1, 0x2, 0x20, 0x80


class Watch:
    """Who touches the files of folders: inotify, which sees all hosts, since they share a kernel."""

    def __init__(self, *folders):
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.inotify_init1(os.O_NONBLOCK)
        self.names = {}
        for folder in folders:
            watch = libc.inotify_add_watch(self.fd, os.fsencode(folder), IN_ACCESS | IN_MODIFY | IN_OPEN | IN_MOVED_TO)
            assert watch >= 0, os.strerror(ctypes.get_errno())
            self.names[watch] = folder.name

    def take(self):
        """{"cluster/lease": times}"""
        out = {}
        try:
            while events := os.read(self.fd, 1 << 16):
                while events:
                    watch, _, _, size = struct.unpack_from("iIII", events)
                    name = events[16:16 + size].rstrip(b"\0").decode()
                    key = f"{self.names[watch]}/{name}"
                    out[key] = out.get(key, 0) + 1
                    events = events[16 + size:]
        except BlockingIOError:
            return out


class Scale(ListedBed):
    count = HOSTS
    layout = dict(tp=1, dp=HOSTS, sp="false")
    cluster = "dead_after = 5"
    changes = {"save = { T.every { steps = 10 } }": "save = { T.every { steps = 1000000 } }",
               "samples = 8": f"samples = {HOSTS}"}

    def test_hosts_that_train_leave_the_shared_folder_alone(self):
        for index in reversed(range(HOSTS)):
            self.start(index)
        self.until(lambda: self.newest() >= 10, "step 10")
        run = self.shared_folder / "run"
        said = {k: log.stat().st_size for k, log in self.logs.items()}
        watch = Watch(run, run / "cluster", run / "checkpoints")
        begin, at = time.monotonic(), self.newest()
        self.until(lambda: self.newest() > at + 20 and time.monotonic() > begin + 3, "steps")
        seconds = time.monotonic() - begin
        touched = watch.take()
        own = {name: times for name, times in touched.items() if name.split("/")[-1] not in ("metrics.jsonl", "")}
        print(f"  {HOSTS} hosts, {self.newest() - at} steps in {seconds:.1f} s: {touched}")
        # The lease changes four times a second, each time by a few calls; none of it comes of who follows.
        self.assertLess(sum(own.values()), 60 * seconds, touched)
        # So does its board, hosts.json, once a second, by a file beside it that takes its name.
        names = {name.split("/")[-1] for name in own if name.startswith("cluster/")}
        self.assertLessEqual({name.split(".")[0] for name in names if not name.startswith(".new-")}, {"lease", "hosts"}, touched)
        self.assertLessEqual(sum(times for name, times in own.items() if name.startswith("cluster/") and "lease" not in name),
                             4 * (seconds + 1), touched)
        for k, log in self.logs.items():
            if k != 0:
                self.assertEqual(log.stat().st_size, said[k], f"h{k} has said more: {log.read_text()[said[k]:]}")
        self.signal_agent(0, "TERM")
        self.until_done()


if __name__ == "__main__":
    main()
