"""ptxas_bounds.py [--update | --cut] BOUNDS SOURCES_DIR OBJECTS_DIRS: what ptxas said of each kernel against committed bounds.

No kernel may spill or have a stack, whatever the toolkit. With the toolkit whose numbers BOUNDS holds, no kernel may take more
registers than it says there, each kernel must stand there with each architecture that it is compiled for, and no other. OBJECTS_DIRS are apart by ":"; in one of them NAME.cu.o.log
is nvcc's output (-Xptxas=-v) for SOURCES_DIR/NAME.cu. ptxas may not say that products of warpgroups are serialized. --update writes BOUNDS. --cut: one bound counts as one register less, so the check must fail. Prints what is
wrong, a line each; exit 1."""
import json
import pathlib
import re
import subprocess
import sys

ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\d+a?)'")
SERIALIZED = re.compile(r"wgmma\S* instructions are serialized.* in the function '(\S+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


def short(name):
    """A demangled kernel as its template with its arguments: no namespaces, no parameters."""
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    name = re.sub(r"\b(?:cairn|kernels|cuda)::", "", name)
    name = re.sub(r"^void ", "", name)
    depth = 0
    for at, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:at].rstrip()
    return name


def demangled(names):
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [short(line) for line in done.stdout.splitlines()]


def kernels_of(log):
    """[(mangled name, architecture, registers, stack bytes, spill bytes)] of nvcc's output."""
    found, entry, stack, spills = [], None, None, None
    for line in log.splitlines():
        if match := ENTRY.search(line):
            entry, stack = match.groups(), None
        elif match := STACK.search(line):
            stack, spills = int(match[1]), int(match[2]) + int(match[3])
        elif (match := REGISTERS.search(line)) and entry and stack is not None:
            found.append((*entry, int(match[1]), stack, spills))
            entry = None
    return found


def in_order(arch):
    return int(arch.rstrip("a")), arch


def read(sources, objects):
    """{"file: kernel": {architecture: (registers, stack, spills)}}, and what is wrong with the logs."""
    out, wrong = {}, []
    for source in sorted(sources.glob("*.cu")):
        logs = [folder / f"{source.name}.o.log" for folder in objects]
        log = next((log for log in logs if log.is_file()), logs[0])
        text = log.read_text() if log.is_file() else ""
        found = kernels_of(text)
        if not found:
            wrong.append(f"{log}: names no kernel")
        wrong += [f"{name}: its products are serialized" for name in demangled(SERIALIZED.findall(text))]
        for name, (_, arch, *numbers) in zip(demangled([f[0] for f in found]), found):
            of = out.setdefault(f"{source.stem}: {name}", {})
            of[arch] = tuple(map(max, of.get(arch, (0, 0, 0)), numbers))
    return out, wrong


def check(kernels, bounds, same_toolkit):
    wrong = []
    for name, of in kernels.items():
        for arch, (registers, stack, spills) in of.items():
            if stack or spills:
                wrong.append(f"{name} (sm_{arch}): {stack} bytes of stack, {spills} of spills")
            bound = bounds.get(name, {}).get(arch)
            if not same_toolkit:
                continue
            if bound is None:
                wrong.append(f"{name} (sm_{arch}): no bound; it takes {registers} registers")
            elif registers > bound:
                wrong.append(f"{name} (sm_{arch}): {registers} registers, bound {bound}")
    if same_toolkit:
        wrong += [f"{name}: a bound of no kernel" for name in bounds if name not in kernels]
        wrong += [f"{name} (sm_{arch}): a bound, and it is not compiled for it"
                  for name, of in bounds.items() if name in kernels for arch in of if arch not in kernels[name]]
    return wrong


def toolkit_of(nvcc):
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"V(\d+\.\d+\.\d+)", told)[1]


def main(arguments):
    mode = arguments.pop(0) if arguments[0].startswith("--") else ""
    bounds_file, sources = map(pathlib.Path, arguments[:2])
    objects = list(map(pathlib.Path, arguments[2].split(":")))
    toolkit = toolkit_of(arguments[3] if len(arguments) > 3 else "nvcc")
    kernels, wrong = read(sources, objects)
    if mode == "--update":
        lines = [f"  {json.dumps(name)}: {json.dumps({a: of[a][0] for a in sorted(of, key=in_order)})}"
                 for name, of in sorted(kernels.items())]
        bounds_file.write_text(f'{{"toolkit": "{toolkit}", "registers": {{\n' + ",\n".join(lines) + "\n}}\n")
        return 0
    committed = json.loads(bounds_file.read_text())
    same = committed["toolkit"] == toolkit
    if not same:
        print(f"bounds are of toolkit {committed['toolkit']}, this is {toolkit}: registers are not compared")
    bounds = committed["registers"]
    if mode == "--cut":
        name = next(iter(bounds))
        bounds[name] = {arch: bound - 1 for arch, bound in bounds[name].items()}
    wrong += check(kernels, bounds, same)
    print("\n".join(wrong))
    print(f"{sum(map(len, kernels.values()))} kernels, {len(wrong)} wrong")
    return 1 if wrong or not kernels else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
