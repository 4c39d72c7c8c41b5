"""Every #include of a project header must follow an edge that CMakeLists.txt declares, every declared edge must have such an
include, JSON is read in one place, which bounds its depth, and a file that a comment or a page names is in this repository.
Prints each line that does not."""
import json
import os
import pathlib
import re
import sys

root, layers = pathlib.Path(sys.argv[1]), json.load(open(sys.argv[2]))
include = re.compile(r'^\s*#include\s+"([^"]+)"')
parses = re.compile(r'\b(?:nlohmann::)?(?:json|Json|ordered_json)::(?:sax_)?parse\(')
bad = checked = 0
for folder, allowed in layers.items():
    used = set()
    for source in sorted(p for p in (root / folder).glob("*") if p.suffix in (".h", ".cc", ".cu")):
        for number, line in enumerate(source.read_text().splitlines(), 1):
            if folder != "runtime/json" and parses.search(line):
                print(f"{source.relative_to(root)}:{number}: JSON is read by runtime/json/json.h, which bounds its depth")
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

# Files that comments and pages name: in a folder of ours, or a page by its name alone. What other projects' files are
# named lies in folders that are not here (Megatron-LM's megatron/training/arguments.py); NAME stands for any.
OURS = r"(?:runtime|ckpt|dsl|converters|recipes/published|tests|docs|bench|cmake)/(?:[\w-]+/)*[\w-]+\.(?:md|h|cc|cu|lua|py|cmake)"
TOOLS = r"tools/[\w-]+\.(?:md|h|cc)"
named = re.compile(rf"(?<![\w./-])({OURS}|{TOOLS}|[\w-]+\.md)(?![\w/])")
comments = {".h": "//", ".cc": "//", ".cu": "//", ".lua": "--", ".py": "#", ".cmake": "#", ".md": ""}
files = []
for folder, below, names in os.walk(root):
    below[:] = [name for name in below if not name.startswith((".", "build"))]
    files += [path for name in names if (path := pathlib.Path(folder, name)).suffix in comments]
pages = {p.name for p in files if p.suffix == ".md"}
for source in sorted(files):
    mark = comments[source.suffix]
    for number, line in enumerate(source.read_text(errors="replace").splitlines(), 1):
        at = line.find(mark)
        for name in named.findall(line, at) if at >= 0 else ():
            if "NAME" not in name and name not in pages and not (root / name).is_file():
                print(f"{source.relative_to(root)}:{number}: {name} is not in this repository")
                bad += 1
print(f"{checked} includes in {len(layers)} folders and the files that {len(files)} name: {bad} mistakes")
sys.exit(1 if bad or not checked else 0)
