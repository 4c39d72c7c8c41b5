"""Plants the faults of a list in a source: each replaces a passage, and one of them at a time can be switched on.

    plant.py SOURCE LIST OUT [FIRST]

LIST has entries of this form; a line that starts with # is a comment. A passage is one or more lines; white space at
the ends of lines and the depth of indentation do not count. It has to occur once in SOURCE. An entry may replace
several passages.

    fault: the leader commits with the part of any host
    - passage of SOURCE
    + what stands there instead; may be missing

OUT is SOURCE with `{ if (::cairn::sim::planted == N) { new } else { old } }` at each passage, where that is a statement, and
`(::cairn::sim::planted == N ? (new) : (old))` where it is an expression; and the names of the faults, by
`planted_in_STEM()` of SOURCE. N counts from FIRST (1).
"""
import doctest
import pathlib
import re
import sys


def entries(text):
    """The faults of a list: [(name, [(old, new)])].

    >>> entries("# c\\nfault: f\\n- a;\\n- b;\\n+ c;\\n- d\\n+ e\\n")
    [('f', [('a;\\nb;', 'c;'), ('d', 'e')])]
    """
    out = []
    last = ""
    for line in text.splitlines():
        if line.startswith("fault: "):
            out.append((line[7:], []))
        elif line[:2] in ("- ", "+ ") and out:
            hunks, mark = out[-1][1], line[0]
            if mark == "-" and last != "-":
                hunks.append(("", ""))
            old, new = hunks[-1]
            hunks[-1] = (f"{old}\n{line[2:]}".strip("\n"), new) if mark == "-" else (old, f"{new}\n{line[2:]}".strip("\n"))
        elif line.strip() and not line.startswith("#"):
            sys.exit(f"not an entry of a list of faults: {line}")
        last = line[:1]
    return out


def planted(source, old, new, number):
    """The source with the fault at its place.

    >>> planted("  x();\\n", "x();", "y();", 2)
    '  { if (::cairn::sim::planted == 2) { y(); } else { x(); } }\\n'
    >>> planted("if (a && b) c();", "a && b", "a", 1)
    'if ((::cairn::sim::planted == 1 ? (a) : (a && b))) c();'
    """
    pattern = r"\s+".join(re.escape(word) for word in old.split())
    found = list(re.finditer(pattern, source))
    if len(found) != 1:
        sys.exit(f"fault {number}: its passage occurs {len(found)} times, not once:\n{old}")
    here, switch = found[0], f"::cairn::sim::planted == {number}"
    if old.rstrip().endswith((";", "}")):
        text = f"{{ if ({switch}) {{ {new} }} else {{ {here.group(0)} }} }}"
    else:
        text = f"({switch} ? ({new}) : ({here.group(0)}))"
    return source[:here.start()] + text + source[here.end():]


def main(source_path, list_path, out_path, first=1):
    source, faults = open(source_path).read(), entries(open(list_path).read())
    for number, (_, hunks) in enumerate(faults, int(first)):
        for old, new in hunks:
            source = planted(source, old, new, number)
    names = "".join(f'    "{name}",\n' for name, _ in faults)
    # A planted fault may leave out the only use of something.
    head = ('#pragma GCC diagnostic ignored "-Wunused-parameter"\n#include <string_view>\n#include <span>\n'
            "namespace cairn::sim {\nextern int planted;\nconstexpr std::string_view kPlanted[] = {\n" + names +
            f"}};\nstd::span<const std::string_view> planted_in_{pathlib.Path(source_path).stem}() {{ return kPlanted; }}\n"
            "}  // namespace cairn::sim\n")
    with open(out_path, "w") as out:
        out.write(head + source)


if __name__ == "__main__":
    if sys.argv[1:] == ["--test"]:
        sys.exit(doctest.testmod().failed > 0)
    main(*sys.argv[1:])
