"""Every relative link in a Markdown file leads to a file, and its #anchor to a heading there. Every docs/NAME.md that a
source names is there, and the heading in quotes behind it; so is every source that a page names in backquotes, and every
file of ours that a comment names. Every message that docs/operations/messages.md explains stands in a source. Prints each that does not."""
import errno
import os
import pathlib
import re
import subprocess
import sys

root = pathlib.Path(sys.argv[1]).resolve()
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
NAMED = re.compile(r'(docs/[\w/-]+\.md)(?:,\s+(?:section\s+)?"([^"\n]+)")?')
SOURCE = re.compile(r"`((?:runtime|ckpt|dsl|tools|converters|tests|bench)/[\w./-]+)`")
# What other projects' files are named lies in folders that are not here (Megatron-LM's megatron/training/arguments.py).
OURS = re.compile(r"(?<![\w./-])((?:runtime|ckpt|dsl|converters|recipes/published|tests|bench|cmake)/(?:[\w-]+/)*[\w-]+"
                  r"\.(?:h|cc|cu|lua|py|cmake)|tools/[\w-]+\.(?:h|cc)|[\w-]+\.md)(?![\w/])")
COMMENTS = {".h": "//", ".cc": "//", ".cu": "//", ".lua": "--", ".py": "#", ".cmake": "#"}
QUOTED = re.compile(r"`([^`\n]+)`")
SOURCES = {".h", ".cc", ".cu", ".py", ".lua", ".cmake", ".txt", ".md", ""}


def outside_code(text):
    text = re.sub(r"(?ms)^```.*?^```", "", text)
    text = re.sub(r"(?m)^ {4,}.*$", "", text)
    return re.sub(r"`[^`\n]*`", "", text)


def headings(path):
    """The anchors that GitHub gives to a file's headings."""
    found, seen = set(), {}
    text = re.sub(r"(?ms)^```.*?^```", "", path.read_text(encoding="utf-8"))
    for title in re.findall(r"(?m)^#+ +(.*?)\s*$", text):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
        found.add(slug if seen[slug] == 0 else f"{slug}-{seen[slug]}")
    return found


def files():
    """Those that belong to the repository; in a copy without git, all but builds and runs."""
    listed = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True)
    if listed.returncode == 0:
        names = [pathlib.Path(name) for name in listed.stdout.splitlines()]
    else:
        names = [p.relative_to(root) for p in root.rglob("*") if p.is_file()]
    return [root / n for n in names if n.suffix in SOURCES and n.parts[0] not in ("build", "runs", "data", ".git")
            and (root / n).is_file()]


def broken_links(text, path):
    """(link, what is wrong) of a Markdown file's relative links."""
    for link in LINK.findall(outside_code(text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or root not in (target, *target.parents):
            yield link, "no such file in the repository"
        elif anchor and (target.suffix != ".md" or anchor not in headings(target)):
            there = headings(target) if target.suffix == ".md" else {"none"}
            yield link, f"no such heading; there are: {', '.join(sorted(there))}"


def literals(sources):
    """All string literals of the C++ sources, adjacent ones joined."""
    joined = []
    for path in sources:
        if path.suffix in (".h", ".cc"):
            text = re.sub(r'"\s*\n\s*(?:R?)"', "", path.read_text(encoding="utf-8", errors="replace"))
            joined += [m.replace('\\"', '"') for m in re.findall(r'"((?:[^"\\\n]|\\.)*)"', text)]
    return "\n".join(joined)


def unknown_messages(page, said):
    """Messages of a table's first column of which no source has the longest run of fixed words."""
    for row in re.findall(r"(?m)^\| (`.*?) \| .* \|$", page):
        for message in QUOTED.findall(row):
            fixed = re.split(r"\.\.\.|\b[A-Z][A-Z]*\b|[<>]|\b\d+\b|[(),:;\[\]]|\b(?:tp|pp|dp|optimizer)\b", message)
            longest = max((f.strip(" .-/") for f in fixed), key=len)
            if longest in os.strerror(errno.EFBIG):
                continue
            if not any(longest in s for s in (said, said.replace("{}", ""))):
                yield message, longest


def unknown_files(text, suffix, pages):
    """Files that the comments of a source name and that are not there; a page may be named without its folder."""
    mark = COMMENTS.get(suffix)
    for line in text.splitlines() if mark else ():
        at = line.find(mark)
        for name in OURS.findall(line, at) if at >= 0 else ():
            if "NAME" not in name and name not in pages and not (root / name).is_file():
                yield name


def main():
    bad = links = names = 0
    every = files()
    pages = {path.name for path in every if path.suffix == ".md"}
    for path in every:
        text = path.read_text(encoding="utf-8", errors="replace")
        where = path.relative_to(root)
        if path.suffix == ".md":
            links += len(LINK.findall(outside_code(text)))
            for link, why in broken_links(text, path):
                print(f"{where}: {link}: {why}")
                bad += 1
            for name in SOURCE.findall(text):  # a ctest is named as its file in tests/, without an ending
                names += 1
                there = any((root / p).exists() for p in (name, f"tests/{name}.cc"))
                if not there and not re.search(r"[A-Z]{4}", name):
                    print(f"{where}: `{name}` is not there")
                    bad += 1
        for name in unknown_files(text, path.suffix, pages) if where.name != "docs_links.py" else ():
            print(f"{where}: a comment names {name}, which is not in this repository")
            bad += 1
        for name, title in NAMED.findall(text):
            if "NAME" in name or where.name == "docs_links.py":
                continue
            names += 1
            if not (root / name).is_file():
                print(f"{where}: names {name}, which is not there")
                bad += 1
            elif title and title not in (root / name).read_text(encoding="utf-8"):
                print(f'{where}: names "{title}" of {name}, which has no such words')
                bad += 1
    page = root / "docs/operations/messages.md"
    for message, longest in unknown_messages(page.read_text(encoding="utf-8"), literals(every)):
        print(f"{page.relative_to(root)}: `{message}`: no source says \"{longest}\"")
        bad += 1
    # The checks themselves: each must find a fault that is put before it.
    probe = root / "docs/probe.md"
    wrong = dict(broken_links("[a](nowhere.md) [b](format.md#nowhere) [c](../../outside.md) `[d](code.md)`", probe))
    missed = {"nowhere.md", "format.md#nowhere", "../../outside.md"} ^ set(wrong)
    if list(unknown_files("x  // see specs.md and ckpt/none.h, megatron/x.py, format.md", ".h", pages)) != ["specs.md", "ckpt/none.h"]:
        print("this test finds no unknown files")
        bad += 1
    if missed or not list(unknown_messages("| `no program says these words` | x |", literals(every))):
        print(f"this test finds no faults: {missed}")
        bad += 1
    print(f"{links} links, {names} names of pages, {bad} wrong")
    sys.exit(1 if bad or not links or not names else 0)


main()
