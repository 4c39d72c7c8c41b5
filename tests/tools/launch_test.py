"""cairn launch, with programs in PATH that write down what they get in the place of sbatch, kubectl and ssh."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
import unittest

from program import ProgramTest, main

RECIPE = """local T = require "cairn"
return T.recipe {
  name = "mine", stop = T.steps(10),
  model = T.gpt { layers = 4, width = 64, heads = 4, context = 32, vocab = 257 },
  data = T.megatron { prefix = "data/text_document", split = { 95, 5 } },
  batch = { samples = 16, micro = 2 },
  optimizer = T.adamw { peak_lr = 1e-3 },
  mesh = T.mesh { tp = 2 },
}
"""

# Takes its input, then says what a launcher would and ends with $CODE.
RECORDER = """#!/bin/sh
printf '%s\\n' "$0" "$@" > "$RECORD.words"
cat > "$RECORD.input"
echo "${SAYS:-Submitted batch job 12}"
exit "${CODE:-0}"
"""

# Records `kubectl apply` like RECORDER; keeps the words of other calls, and answers them with $OTHERS_SAY.
KUBECTL = RECORDER.replace("printf", """case "$1" in apply) ;; *)
  echo "$*" >> "$RECORD.others"; printf '%s' "$OTHERS_SAY"; exit "${OTHERS_CODE:-0}";;
esac
printf""", 1)

# As sshd does: the last word goes to a shell, which may be on another host.
SSH = """#!/bin/sh
for word; do previous=$host; host=$command; command=$word; done
printf '%s\\n' "$@" > "$RECORD.$host.words"
case " $UNREACHABLE " in *" $host "*) echo "ssh: connect to host $host: refused" >&2; exit 255;; esac
export HOST="$host"
exec "${SHELL_THERE:-sh}" -c "$command"
"""

# In the place of cairn on a host.
AGENT = """#!/bin/sh
echo "in $(pwd) with A=$A"
for word; do echo "word $word"; done
printf 'an error' >&2
if [ -n "$STAY" ]; then
  trap 'echo TERM came; exit 3' TERM
  trap 'echo USR1 came' USR1
  trap 'echo INT came' INT
  echo ready
  while :; do sleep 0.05; done
fi
case "$HOST" in h0) exit "${CODE_H0:-0}";; *) exit "${CODE_OTHERS:-0}";; esac
"""


def restricted_violations(pod):
    """The rules of the Pod Security Standard `restricted` that a pod's spec breaks, those of `baseline` among them
    (kubernetes.io/docs/concepts/security/pod-security-standards, of 1.37)."""
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    found += sorted({kind for volume in pod["volumes"] for kind in volume if kind != "name"} - allowed)
    above = pod.get("securityContext", {})
    found += [key for key in ("sysctls", "seLinuxOptions", "windowsOptions", "appArmorProfile") if key in above]
    for container in pod["containers"]:
        context = {**above, **container.get("securityContext", {})}
        if context.get("privileged"):
            found.append("privileged")
        if context.get("allowPrivilegeEscalation") is not False:
            found.append("allowPrivilegeEscalation")
        if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
            found.append("runAsNonRoot")
        if context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            found.append("seccompProfile")
        capabilities = context.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", []):
            found.append("capabilities.drop")
        if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            found.append("capabilities.add")
        if any("hostPort" in port for port in container.get("ports", [])):
            found.append("hostPort")
    return found


FREE_KEYS = ("labels", "annotations", "matchLabels", "selector", "data", "nodeSelector", "requests", "limits")


def fields_of(value, where, into):
    """The fields that stand at each place, as docs/operations/cluster.md lists them: a JobSet's Job is a Job."""
    where = where.replace("JobSet.spec.replicatedJobs.template", "Job", 1).replace("Job.spec.template.spec", "Pod", 1)
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, dict):
            into.setdefault(where, set()).update(one)
            for key, inner in one.items():
                if key not in FREE_KEYS:
                    fields_of(inner, f"{where}.{key}", into)


class LaunchTest(ProgramTest):
    def setUp(self):
        super().setUp()
        self.write("recipes/mine.lua", RECIPE)
        for name, text in (("sbatch", RECORDER), ("kubectl", KUBECTL), ("ssh", SSH), ("agent", AGENT)):
            os.chmod(self.write(f"bin/{name}", text), 0o755)
        self.env = {"PATH": self.path("bin") + os.pathsep + os.environ["PATH"], "RECORD": self.path("record")}

    def cluster(self, launcher, fields):
        return self.write("cluster.lua", f'local T = require "cairn"\nreturn T.{launcher} {{\n{fields}\n}}\n')

    def launch(self, *args, code=0, **env):
        return self.cairn("launch", "recipes/mine.lua", "--cluster", "cluster.lua", *args, code=code,
                          env={**self.env, **env})

    def recorded(self, what):
        with open(self.path(f"record.{what}"), encoding="utf-8") as f:
            return f.read()

    def assert_nothing_submitted(self):
        self.assertFalse([name for name in os.listdir(self.folder.name) if name.startswith("record")])

    # Slurm

    def test_sbatch_gets_what_the_dry_run_prints(self):
        self.cluster("slurm", "hosts = 2, ranks_per_host = 2, spares = 1")
        shown = self.launch("--dry-run", "--set", "optimizer.offload=it's \"here\"").stdout
        self.assert_nothing_submitted()
        done = self.launch("--set", "optimizer.offload=it's \"here\"")
        self.assertEqual(done.stdout, "Submitted batch job 12\n")
        self.assertEqual(self.recorded("input"), shown)
        self.assertEqual(self.recorded("words"), self.path("bin/sbatch") + "\n")
        self.assertIn("#SBATCH --nodes=3\n", shown)
        self.assertIn(f"\ncd {self.folder.name} || exit 2\n", shown)
        self.assertIn(f" {self.program} train {self.path('recipes/mine.lua')} ", shown)
        self.assertIn(""" --set 'optimizer.offload=it'\\''s "here"' --run runs/mine """, shown)
        self.assertEqual(subprocess.run(["bash", "-n"], input=shown, text=True, check=False).returncode, 0)

    def test_the_script_runs_its_words_and_queues_itself_again(self):
        os.chmod(self.write("bin/srun", "#!/bin/sh\nprintf '%s\\n' \"$@\" > \"$RECORD.srun\"\npwd\necho $A\nexit $CODE\n"),
                 0o755)
        os.chmod(self.write("bin/scontrol", "#!/bin/sh\necho \"scontrol $*\"\n"), 0o755)
        os.mkdir(self.path("my work"))
        workdir = self.path("my work")
        self.cluster("slurm", f"hosts = 1, ranks_per_host = 2, workdir = \"{workdir}\", env = {{ \"A=it's $A\" }}")
        script = self.launch("--run", "runs/a b", "--dry-run", "--", "--trace", "steps=1..2").stdout

        def runs(code, job="12", ends=None, **env):
            done = subprocess.run(["bash"], input=script, text=True, capture_output=True, timeout=30, check=False,
                                  env={**os.environ, **self.env, "CODE": str(code), "SLURM_JOB_ID": job, **env})
            self.assertEqual(done.returncode, code if ends is None else ends, done.stderr)
            self.assertTrue(done.stdout.startswith(f"{workdir}\nit's $A\n"), done.stdout)
            return f"scontrol requeue {job}\n" in done.stdout

        os.makedirs(self.path("runs/a b/checkpoints"))
        self.assertEqual([code for code in (0, 2, 65, 69, 70, 73, 74, 75, 76, 137) if runs(code)], [69, 75])
        os.mkdir(self.path("runs/a b/checkpoints/step-00000020"))
        self.assertEqual([runs(69) for _ in range(7)], [True] * 5 + [False] * 2)
        self.assertTrue(runs(69, job="13"))  # submitted again
        os.mkdir(self.path("runs/a b/checkpoints/step-100000000"))
        os.mkdir(self.path("runs/a b/checkpoints/.tmp-step-100000001"))
        self.assertEqual([runs(75, job="13") for _ in range(6)], [True] * 5 + [False])

        # The leader's last word is the run's, whatever the other hosts have ended with.
        say = 'mkdir -p "$RUN/cluster"; echo "{\\"code\\":$LAST,\\"incarnation\\":\\"$$\\"}" > "$RUN/cluster/end.json"; exit $CODE'
        self.write("bin/srun", f"#!/bin/sh\nprintf '%s\\n' \"$@\" > \"$RECORD.srun\"\npwd\necho $A\n{say}\n")
        run = self.path("runs/a b")
        self.assertFalse(runs(69, job="14", RUN=run, LAST="0", ends=0))
        self.assertTrue(runs(137, job="14", RUN=run, LAST="75", ends=75))
        self.assertFalse(runs(73, job="14", RUN=run, LAST="75"))  # another run's

        # Others may write into the run folder: their text is neither run nor reckoned with, and no link is followed.
        kept = self.write("kept", "mine")
        for tries in (f"a[$(touch${{IFS}}{self.path('ran')})]", "03", "-3", "9" * 40):
            self.write("runs/a b/requeues", f"15 step-100000000 {tries}\n")
            self.assertTrue(runs(69, job="15", RUN=run, LAST="69"), tries)
        self.assertFalse(os.path.exists(self.path("ran")))
        os.remove(self.path("runs/a b/requeues"))
        os.symlink(kept, self.path("runs/a b/requeues"))
        self.assertTrue(runs(69, job="15", RUN=run, LAST="69"))
        with open(kept, encoding="utf-8") as file:
            self.assertEqual(file.read(), "mine")
        self.assertTrue(runs(75, job="16", RUN=run, LAST="null"))  # an end without a code: srun's counts

        # Where nothing can be counted, by the number of starts.
        shutil.rmtree(run)
        self.write("runs/a b", "")
        self.write("bin/srun", "#!/bin/sh\nprintf '%s\\n' \"$@\" > \"$RECORD.srun\"\npwd\necho $A\nexit $CODE\n")
        self.assertEqual([runs(69, SLURM_RESTART_COUNT=count) for count in ("0", "4", "5")], [True, True, False])
        words = self.recorded("srun").splitlines()
        self.assertEqual(words[words.index("train"):],
                         ["train", self.path("recipes/mine.lua"), "--run", self.path("runs/a b"), "--cluster",
                          self.path("cluster.lua"), "--nproc", "2", "--exit-when-unfinished", "75", "--trace", "steps=1..2"])

    def test_options_of_the_run_may_follow_a_list(self):
        self.write("recipes/small.lua", "return { seed = 3 }\n")
        self.cluster("slurm", "hosts = 2, ranks_per_host = 2")
        for words in (["--set", "seed=3"], ["--with", "recipes/small.lua"], ["--set", "seed=3", "--set", "seed=4"]):
            with self.subTest(words):
                shown = self.launch("--dry-run", *words, "--", "--trace", "steps=1..2").stdout
                self.assertIn(" --exit-when-unfinished 75 --trace steps=1..2\n", shown)

    def test_a_refusal_of_the_launcher_is_one_of_launch(self):
        self.cluster("slurm", "hosts = 2, ranks_per_host = 2")
        done = self.launch(code=69, CODE="1", SAYS="sbatch: error: no such partition")
        self.assertIn("no such partition", done.stdout)
        self.assertIn("sbatch ended with 1", done.stderr)
        done = self.launch(code=69, PATH="/nowhere")
        self.assertIn("sbatch: no such program in PATH; nothing was submitted", done.stderr)

    # Kubernetes

    PODS = ('hosts = 2, ranks_per_host = 2, spares = 1, image = "cairn:1", workdir = "/shared", '
            'mounts = { T.mount { "/shared", claim = "shared" } }')

    def test_kubectl_gets_what_the_dry_run_prints(self):
        self.write("recipes/small.lua", "return { seed = 3 }\n")
        self.cluster("kubernetes", self.PODS)
        shown = self.launch("--with", "recipes/small.lua", "--dry-run").stdout
        self.assert_nothing_submitted()
        done = self.launch("--with", "recipes/small.lua", SAYS="job.batch/mine created")
        self.assertEqual(done.stdout, "job.batch/mine created\n")
        self.assertEqual(self.recorded("input"), shown)
        self.assertEqual(self.recorded("words").splitlines()[1:], ["apply", "-f", "-"])
        files, service, job = json.loads(shown)["items"]
        self.assertEqual([item["kind"] for item in (files, service, job)], ["ConfigMap", "Service", "Job"])
        self.assertEqual(job["spec"]["completions"], 3)
        pod = job["spec"]["template"]["spec"]
        container = pod["containers"][0]
        self.assertEqual(container["command"][:5],
                         ["cairn", "train", "/etc/cairn/recipes/mine.lua", "--with", "/etc/cairn/recipes/small.lua"])
        self.assertIn("runs/mine", container["command"])
        size = int(pod["volumes"][0]["emptyDir"]["sizeLimit"])
        self.assertGreaterEqual(size, 64 << 20)
        # The files in the pod are a recipe and a cluster file that are accepted there.
        for item in pod["volumes"][1]["configMap"]["items"]:
            self.write(os.path.join("pod", item["path"]), files["data"][item["key"]])
        self.cairn("check", "pod/recipes/mine.lua", "--with", "pod/recipes/small.lua", "--world", "4", "--recipe-only")
        self.cairn("launch", "pod/recipes/mine.lua", "--cluster", "pod/cluster.lua", "--dry-run")

    def test_dev_shm_holds_the_plans_slots_and_weights_of_the_fewest_hosts(self):
        def size(fields):
            self.cluster("kubernetes", self.PODS + fields)
            shown = self.launch("--set", "model.width=1024", "--set", "model.layers=8", "--dry-run").stdout
            return int(json.loads(shown)["items"][2]["spec"]["template"]["spec"]["volumes"][0]["emptyDir"]["sizeLimit"])

        plan = self.cairn_json("plan", "recipes/mine.lua", "--world", "4", "--set", "model.width=1024", "--set",
                               "model.layers=8")
        needed = plan["shared_memory"]["bytes"] / 2  # of two hosts
        self.assertGreater(size(""), needed)
        self.assertLess(size(""), 1.25 * needed)
        self.assertGreater(size(", hosts_min = 1"), 2 * needed)
        self.assertEqual(size(', shm = "3GiB"'), 3 << 30)

    FULL = (', namespace = "train", resources = { cpu = 2, memory = "8GiB", others = { "nvidia.com/gpu=1" } }, '
            'node_selector = { "pool=big" }, env = { "A=b" }, grace = 60, user = 1000, group = 1000, '
            'tolerations = { "gpu", "a=b:NoSchedule" }, avoid_nodes = { "n1" }, pull_secrets = { "registry" }, '
            'labels = { "team=a" }, annotations = { "a/b=c" }, priority_class = "high", scheduler = "mine", '
            'queue = "team", rdma = "rdma/hca=1", host_network = true, remove_after = "24h"')
    MOUNTS = 'mounts = { T.mount { "/shared", claim = "shared" } }'
    MORE_MOUNTS = ('mounts = { T.mount { "/shared", claim = "shared", sub_path = "a" }, '
                   'T.mount { "/data", host_path = "/srv", read_only = true } }')

    def objects(self, fields):
        self.cluster("kubernetes", self.PODS.replace(self.MOUNTS, fields if "mounts" in fields else self.MOUNTS + fields))
        return json.loads(self.launch("--dry-run").stdout)["items"]

    def pod(self, fields):
        return self.objects(fields)[-1]["spec"]["template"]["spec"]

    def test_pods_are_restricted_unless_something_that_is_asked_for_cannot_be(self):
        for fields, violations in (
            ("", []), (', user = 1000, priority_class = "high", restart_in_place = true', []),
            (", host_network = true", ["hostNetwork"]), (', rdma = "rdma/hca=1"', ["capabilities.add"]),
            (self.MORE_MOUNTS, ["hostPath"]),
            (', security = "image"', ["allowPrivilegeEscalation", "runAsNonRoot", "seccompProfile", "capabilities.drop"]),
        ):
            with self.subTest(fields):
                self.assertEqual(restricted_violations(self.pod(fields)), violations)

    def test_the_fields_in_use_are_those_that_the_docs_list(self):
        used = {}
        for fields in ("", self.MORE_MOUNTS + self.FULL + ", restart_in_place = true",
                       self.MORE_MOUNTS + self.FULL + ", jobset = true", ", share_nodes = true",
                       self.MORE_MOUNTS + self.FULL.replace('"mine"', '"volcano"')):
            for item in self.objects(fields):
                fields_of(item, item["kind"], used)
        page = (pathlib.Path(__file__).resolve().parents[2] / "docs/operations/cluster.md").read_text(encoding="utf-8")
        table = page[page.index("| place | fields |"):].split("\n\n")[0].splitlines()[2:]
        listed = {}
        for row in table:
            places, fields = row.split("|")[1:3]
            for place in re.findall(r"`([^`]*)`", places):
                listed[place] = set(re.findall(r"`([^`]*)`", fields))
        self.assertEqual(listed, used)

    def test_the_launch_applies_again_what_a_deleted_job_took_along(self):
        # Kubernetes removes the Service of the deleted Job after `apply` has found it unchanged.
        os.chmod(self.write("bin/kubectl", """#!/bin/sh
echo "$1 $4" >> "$RECORD.calls"
case "$1" in
  apply) cat > /dev/null; : > "$RECORD.service.$(grep -c apply "$RECORD.calls")"; echo job.batch/mine created;;
  get) printf 1-2;;
  patch) [ "$2" != Service ] || [ -e "$RECORD.service.2" ] || { echo "services mine not found" >&2; exit 1; };;
esac
"""), 0o755)
        self.cluster("kubernetes", self.PODS)
        done = self.launch()
        self.assertEqual(done.stdout, "job.batch/mine created\n")
        self.assertEqual(done.stderr, "services mine not found\n")
        self.assertEqual([line.split()[0] for line in self.recorded("calls").splitlines()],
                         ["apply", "get", "patch", "patch"] * 2)

    def test_the_job_owns_what_was_submitted_with_it(self):
        self.cluster("kubernetes", self.PODS + ', namespace = "train"')
        done = self.launch(SAYS="job.batch/mine created", OTHERS_SAY="1-2")
        self.assertEqual((done.stdout, done.stderr), ("job.batch/mine created\n", ""))
        asked, files, service = self.recorded("others").splitlines()
        self.assertEqual(asked, "get job.batch/mine --output=jsonpath={.metadata.uid} --namespace train")
        self.assertRegex(files, r'^patch --namespace train ConfigMap mine-[0-9a-f]{16} --type=merge --patch=.*"uid":"1-2"')
        self.assertIn("patch --namespace train Service mine ", service)
        self.cluster("kubernetes", self.PODS + ", jobset = true")
        os.remove(self.path("record.others"))
        self.launch(SAYS="jobset.jobset.x-k8s.io/mine created", OTHERS_SAY="1-2")
        self.assertEqual(len(self.recorded("others").splitlines()), 2)
        self.assertTrue(self.recorded("others").startswith("get jobset.jobset.x-k8s.io/mine "))
        for env in ({"OTHERS_SAY": ""}, {"OTHERS_SAY": "1-2", "OTHERS_CODE": "1"}):  # a cluster that does not let it
            done = self.launch(SAYS="jobset.jobset.x-k8s.io/mine created", **env)
            self.assertIn("mine was submitted, and does not own its other objects", done.stderr)

    def test_a_job_that_was_there_is_no_start(self):
        self.cluster("kubernetes", self.PODS)
        done = self.launch(code=69, SAYS="configmap/mine-files configured\njob.batch/mine unchanged")
        self.assertIn("kubectl delete job mine", done.stderr)
        self.cluster("kubernetes", self.PODS + ", jobset = true")
        done = self.launch(code=69, SAYS="jobset.jobset.x-k8s.io/mine unchanged")
        self.assertIn("kubectl delete jobset mine", done.stderr)
        self.assertFalse(os.path.exists(self.path("record.others")))

    @unittest.skipUnless(os.environ.get("CAIRN_KUBERNETES_VALIDATE"), "set by .ci/run, which installs it")
    def test_kubernetes_own_schemas_accept_the_objects(self):
        def validate(objects, version):
            paths = []
            for k, item in enumerate(objects):
                paths.append(self.write(f"object-{k}.json", json.dumps(item)))
            return subprocess.run([os.environ["CAIRN_KUBERNETES_VALIDATE"], "--strict", "--no-warn", "-k", version, *paths],
                                  capture_output=True, text=True, timeout=100, check=False)

        for fields, versions in (("", ("1.33.0", "1.37.0")), (self.MORE_MOUNTS + self.FULL, ("1.33.0", "1.37.0")),
                                 (", share_nodes = true", ("1.33.0",)), (", restart_in_place = true", ("1.35.0", "1.37.0")),
                                 (", jobset = true" + self.FULL, ("1.33.0", "1.37.0"))):
            objects = self.objects(fields)
            if objects[-1]["kind"] == "JobSet":  # its schema is not Kubernetes' own, but its Job's is
                objects[-1] = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "mine"},
                               "spec": objects[-1]["spec"]["replicatedJobs"][0]["template"]["spec"]}
            for version in versions:
                with self.subTest(fields=fields, version=version):
                    done = validate(objects, version)
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        objects = self.objects("")
        # A validator that takes all would prove nothing.
        objects[2]["spec"]["template"]["spec"]["containers"][0]["imagePull"] = "x"
        self.assertNotEqual(validate(objects[2:], "1.33.0").returncode, 0)
        objects[2]["spec"]["completions"] = "three"
        self.assertNotEqual(validate(objects[2:], "1.33.0").returncode, 0)

    # ssh

    def hosts(self, fields="", names=("h0", "h1")):
        listed = ", ".join(f'"{name}"' for name in names)
        self.cluster("hosts", f'names = {{ {listed} }}, ranks_per_host = 2, program = "{self.path("bin/agent")}", '
                              f'workdir = "{self.folder.name}", env = {{ "A=it\'s" }}{fields}')

    def test_each_host_runs_an_agent_whose_lines_bear_its_name(self):
        self.hosts(', options = { "-p", "22" }')
        for shell in ("sh", "bash"):
            done = self.launch("--run", "runs/a b", "--", "--trace", "steps=1..2", SHELL_THERE=shell)
            lines = done.stdout.splitlines()
            for k, host in enumerate(("h0", "h1")):
                own = [line[4:] for line in lines if line.startswith(f"{host}: ")]
                self.assertEqual(own, [f"in {self.folder.name} with A=it's"] + [f"word {word}" for word in (
                    "train", self.path("recipes/mine.lua"), "--run", self.path("runs/a b"), "--cluster",
                    self.path("cluster.lua"), "--nproc", "2", "--trace", "steps=1..2", "--hosts", "h0,h1", "--host-index",
                    str(k))])
                self.assertIn(f"{host}: an error\n", done.stderr)
                self.assertEqual(self.recorded(f"{host}.words").splitlines()[:7],
                                 ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-p", "22", host])

    def test_the_dry_run_prints_the_commands_that_would_run(self):
        self.hosts()
        shown = self.launch("--dry-run").stdout
        self.assert_nothing_submitted()
        self.assertEqual(len(shown.splitlines()), 2)
        typed = subprocess.run(["sh"], input=shown, text=True, capture_output=True, timeout=30, check=False,
                               env={**os.environ, **self.env})
        launched = self.launch()
        without_names = [line[4:] for line in launched.stdout.splitlines()]
        self.assertEqual(sorted(typed.stdout.splitlines()), sorted(without_names))

    def test_the_code_is_that_of_the_first_host_or_of_the_next_that_was_not_lost(self):
        self.hosts()
        done = self.launch(code=75, CODE_H0="75", CODE_OTHERS="3")
        self.assertIn("h0: ended with 75\n", done.stderr)
        self.assertIn("h1: ended with 3\n", done.stderr)
        self.launch(code=0, CODE_OTHERS="3")
        done = self.launch(code=3, CODE_OTHERS="3", UNREACHABLE="h0")
        self.assertIn("h0: ssh: connect to host h0: refused\n", done.stderr)
        done = self.launch(code=69, UNREACHABLE="h0 h1")
        self.assertIn("no host could be reached", done.stderr)
        os.remove(self.path("bin/ssh"))
        self.assertIn("ssh: no such program in PATH", self.launch(code=69, PATH="/nowhere").stderr)

    def start(self):
        self.hosts()
        command = [self.program, "launch", "recipes/mine.lua", "--cluster", "cluster.lua"]
        with open(self.path("out"), "w", encoding="utf-8") as out:
            # As in the background of a script, where SIGINT is ignored.
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            started = subprocess.Popen(command, cwd=self.folder.name, stdin=subprocess.DEVNULL, stdout=out,
                                       stderr=subprocess.STDOUT, restore_signals=False,
                                       env={**os.environ, **self.env, "STAY": "1"})
            signal.signal(signal.SIGINT, before)
        self.addCleanup(started.wait)
        self.addCleanup(started.kill)
        self.wait_for_lines("h0: ready", "h1: ready")
        return started

    def wait_for_lines(self, *lines):
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with open(self.path("out"), encoding="utf-8") as f:
                there = f.read().splitlines()
            if all(line in there for line in lines):
                return
            time.sleep(0.02)
        self.fail(f"not all of {lines} in {there}")

    def test_signals_reach_the_agent_of_each_host(self):
        started = self.start()
        for sent, line in ((signal.SIGUSR1, "USR1 came"), (signal.SIGINT, "INT came")):
            started.send_signal(sent)
            self.wait_for_lines(f"h0: {line}", f"h1: {line}")
        self.assertIsNone(started.poll())
        started.send_signal(signal.SIGTERM)
        self.assertEqual(started.wait(timeout=20), 3)
        self.wait_for_lines("h0: TERM came", "h1: TERM came")

    def test_a_killed_launch_ends_no_agent(self):
        os.chmod(self.write("bin/agent", AGENT.replace("echo ready", 'echo ready; echo $$ > "$RECORD.$HOST.pid"')), 0o755)
        started = self.start()
        started.kill()
        started.wait(timeout=20)
        time.sleep(0.3)
        for host in ("h0", "h1"):
            pid = int(self.recorded(f"{host}.pid"))
            os.kill(pid, signal.SIGTERM)  # it is there
            until = time.monotonic() + 20
            while os.path.exists(f"/proc/{pid}/stat") and time.monotonic() < until:
                with open(f"/proc/{pid}/stat", encoding="utf-8") as f:
                    if f.read().rpartition(")")[2].split()[0] == "Z":
                        break
                time.sleep(0.02)
            else:
                self.assertLess(time.monotonic(), until)

    # What is refused

    def test_a_refused_launch_submits_nothing(self):
        slurm = "hosts = 2, ranks_per_host = 2"

        def refused(*args, says):
            done = self.launch(*args, code=2)
            self.assertIn(says, done.stderr)
            self.assertEqual(done.stdout, "")
            self.assert_nothing_submitted()

        self.cluster("slurm", slurm + ", image = \"x\"")
        refused(says="cluster.lua:3: image: no such field in slurm\n")
        refused("--dry-run", says="1 error. Nothing was started.")
        self.cluster("slurm", "hosts = 1, ranks_per_host = 3")
        refused(says="recipes/mine.lua:")  # tp 2 does not divide 3 ranks
        self.cluster("slurm", slurm)
        refused("--set", "model.widht=3", says="did you mean `width`?")
        refused("--set", "mesh.tp=4", says="cluster.lua: mesh.tp = 4: ranks 0 to 3 exchange in every layer, and lie on "
                                           "hosts 0 to 1 with ranks_per_host = 2")
        refused("--run", "a\nb", says="has the control character \\x0a")
        refused("--", "--nprocs", "3", says="behind --, as `cairn train` sees it: ")
        refused("--", "--nproc", "3", says="--nproc: the cluster file says it")
        refused("--", "--run", "x", says="--run stands before --, where it is checked")
        refused("--", "--set", "seed=3", says="--set stands before --, where it is checked")
        refused("--", "--exit-when-unfinished", "3", says="the launcher starts the run again by code 75")
        refused("--", "--help", says="behind -- stand options of the run")
        self.cluster("slurm", slurm + ", requeue = false")
        self.launch("--dry-run", "--", "--exit-when-unfinished", "3")
        self.cluster("kubernetes", slurm + ', image = "cairn:1", workdir = "/home"')
        refused(says="the run folder /home/runs/mine lies in none of the mounts")
        self.cairn("launch", "recipes/mine.lua", code=2)
        self.cairn("launch", "recipes/mine.lua", "--cluster", "nowhere.lua", code=2)


if __name__ == "__main__":
    main()
