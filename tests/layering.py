"""Every #include of a project header must follow an edge that CMakeLists.txt declares, every declared edge must have such an
include; JSON is read and printed in one place, which bounds its depth and throws at no bytes; files are made in one place, which follows no link; addresses in a device's memory are for who runs there; the top
level has no other folder. Prints each line that does not."""
import json
import pathlib
import re
import subprocess
import sys

root, layers = pathlib.Path(sys.argv[1]), json.load(open(sys.argv[2]))
include = re.compile(r'^\s*#include\s+"([^"]+)"')
opens = re.compile(r"\.address\(\)|\baddress_of\(")
opening = ("runtime/device", "runtime/kernels", "runtime/kernels/cuda", "runtime/comm", "runtime/gloo", "runtime/cuda", "runtime/cuda/ops",
           "runtime/cuda/nccl", "ckpt/copy", "ckpt/snapshot", "tools")  # links and pagers of state; tools: of hosts
parses = re.compile(r'\b(?:nlohmann::)?(?:json|Json|ordered_json)::(?:sax_)?parse\(')
prints = re.compile(r"(?:\.|->)dump\(")
assumes = re.compile(r"(?:\.|->)value\([^()]*,")
makes = re.compile(r"\bO_CREAT\b(?!.*\b(O_EXCL|O_NOFOLLOW)\b)|\bofstream\b|\bfopen\(|\bmkos?temp\(|\bcopy_file\(")
makers = ("tools/cmd_ckpt_cat.cc", "runtime/core/new_file.h")  # writes in place where its person names a pipe, otherwise exclusively
top_level = (".ci", "bench", "ckpt", "cmake", "converters", "docs", "dsl", "recipes", "runtime", "tests", "tools")
git = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True)
tracked = git.stdout if git.returncode == 0 else ""  # an archive of the sources is in no repository
bad = checked = 0
for folder, allowed in layers.items():
    used = set()
    for source in sorted(p for p in (root / folder).glob("*") if p.suffix in (".h", ".cc", ".cu")):
        for number, line in enumerate(source.read_text().splitlines(), 1):
            if folder != "runtime/json" and parses.search(line):
                print(f"{source.relative_to(root)}:{number}: JSON is read by runtime/json/json.h, which bounds its depth")
                bad += 1
            if folder != "runtime/json" and prints.search(line):
                print(f"{source.relative_to(root)}:{number}: json_text() makes text of a value: the library throws at bytes that are no UTF-8")
                bad += 1
            if folder != "runtime/json" and assumes.search(line):
                print(f"{source.relative_to(root)}:{number}: json_field() and its kin read others' JSON: value() throws at another type")
                bad += 1
            if str(source.relative_to(root)) not in makers and makes.search(line):
                print(f"{source.relative_to(root)}:{number}: runtime/core/new_file.h makes files: a name that others foresee may be their link")
                bad += 1
            if folder not in opening and opens.search(line):
                print(f"{source.relative_to(root)}:{number}: who does not run on the device has no address of its memory")
                bad += 1
            match = include.match(line)
            if not match:
                continue
            target = match.group(1)
            checked += 1
            where = f"{source.relative_to(root)}:{number}"
            if not (root / target).is_file():
                print(f"{where}: \"{target}\" is not a file below the repository root")
                bad += 1
                continue
            used.add(str(pathlib.PurePosixPath(target).parent))
            if (parent := str(pathlib.PurePosixPath(target).parent)) not in (folder, *allowed):
                print(f"{where}: {folder} may not include {parent} (CMakeLists.txt declares: {', '.join(allowed)})")
                bad += 1
    for unused in (edge for edge in allowed if edge not in used):
        print(f"{folder} includes nothing of {unused}: CMakeLists.txt declares an edge that nobody uses")
        bad += 1
for name in sorted({line.split("/")[0] for line in tracked.splitlines() if "/" in line} - set(top_level)):
    print(f"{name}/: the top level has {', '.join(top_level)}, and no other folder")
    bad += 1
print(f"{checked} includes in {len(layers)} folders, {bad} against the layering")
sys.exit(1 if bad or not checked else 0)
