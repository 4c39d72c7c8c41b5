"""Every C++ source is as clang-format 14 prints it by .clang-format. Names the lines that are not; 77 without that version,
as others print some lines otherwise."""
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys

root = pathlib.Path(sys.argv[1]).resolve()
program = shutil.which("clang-format-14") or shutil.which("clang-format")
version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout if program else "no clang-format"
if not re.search(r"\bversion 14\.", version):
    print(f"clang-format 14 is not here ({version.strip()})")
    sys.exit(77)
listed = subprocess.run(["git", "-C", root, "ls-files", "*.cc", "*.h", "*.cu"], capture_output=True, text=True)
names = [name for name in listed.stdout.splitlines() if (root / name).is_file()]
if not names:
    print(f"{root}: git lists no sources; an archive of them has nothing to compare")
    sys.exit(77)


def wrong(part):
    said = subprocess.run([program, "--dry-run", *part], cwd=root, capture_output=True, text=True).stderr
    return re.findall(r"^\S+?:\d+(?=:\d+: warning)", said, re.MULTILINE)


parts = [names[i::8 * (os.cpu_count() or 1)] for i in range(8 * (os.cpu_count() or 1))]
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    places = sorted({place for found in pool.map(wrong, filter(None, parts)) for place in found})
print(*places, sep="\n")
print(f"{len(names)} sources, {len(places)} lines that are not as clang-format 14 prints them; mend: clang-format-14 -i FILE")
sys.exit(bool(places))
