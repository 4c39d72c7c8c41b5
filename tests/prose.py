"""The English of the repository, as far as a script can hold it: eight rules, a count for each folder and rule that may only fall.

    prose.py ROOT                  compares with ROOT/tests/prose_counts.txt; 1 where a count has changed
    prose.py ROOT --list FOLDER    prints each sentence that breaks a rule there
    prose.py ROOT --update         writes lower counts; refuses where a rule's total is higher (sentences may move between folders)

Read are pages, comments, docstrings, messages (string literals with a space), names of tests, and the subjects of commits made
since this script exists. Code, generated pages and quotations in backquotes are not read. The rules are patterns: a
sentence that breaks one is rewritten, and where English has no other word the pattern is mended here, with an example.
"""
import collections
import doctest
import os
import pathlib
import re
import subprocess
import sys

COUNTS = "tests/prose_counts.txt"
# Their text stands in sources that are read.
GENERATED = {"docs/commands.md", "docs/recipe.md", "docs/published-recipes.md"}
COMMENT = {".py": "#", ".lua": "--", ".cmake": "#", ".sh": "#", "": "#"}
CODE = {".h", ".cc", ".cu", ".c"}

CLAUSE = r"(?:^|[.;:,(\u2013]\s*|\b(?:and|or|but|if|where|when|than|as|by|to|of|for|from|with|on|so)\s+)"
PATTERNS = {
    "R2": re.compile(rf"\b(?:whoever|nobody)\b|{CLAUSE}who\b", re.I),
    "R3": re.compile(r"\b(?:tells?|told|telling)\b(?!(?:\s+\S+){0,4}\s+apart\b)", re.I),
    "R4": re.compile(r"\b(?:go|goes|went|going|gone)\s+on\b(?!\s+(?:a|an|the|its|one)\b)", re.I),
    "R5": re.compile(r"\bso\s+(?:many|long|often)\b", re.I),
    "R6": re.compile(r"\b(?:is|are|was|were)\s+(?:not\s+)?there\b|\blives?\s+no\s+more\b|\balone\b", re.I),
    "R8": re.compile(r"\bbanks?\b|\bincarnations?\b", re.I),
}
# R8 of pages: in a program of numbers a double is a number.
STAND_IN = re.compile(r"\b(?:a|an|the|on|by|of|its|own|with) doubles?\b(?! (?:of the|precision|quotes?|words?|keys?|spaces?)\b)", re.I)
RULES = ("R1", "R2", "R3", "R4", "R5", "R6", "R7", "R8")
SAY = {
    "R1": "opens with a bare Of, That, Those, Who, Whose, What or As: begin with the actor and the verb",
    "R2": "the actor has a name (agent, rank 0, reader), not who, whoever or nobody",
    "R3": "report, print or say, not tell",
    "R4": "continue or resume, not go on",
    "R5": "name the quantity, not so many, so long or so often",
    "R6": "exists, missing, present, only; not is there, lives no more, alone",
    "R7": "a test name or commit subject is a main clause with its verb",
    "R8": "the glossary's words: slot (bank), generation (incarnation); on pages stand-in (a double)",
}
OPENS = re.compile(r"(?:Of|That|Those|Who|Whose|What|As)\b(?!,| of now\b| in\b| well\b| soon as\b| course\b| long as\b| a (?:result|rule)\b)")

# Finite verbs by which a test name or a subject is known to be a clause. An unknown verb joins the list.
AUXILIARIES = set("is are was were has have had can cannot may must will does do did would should needs need lets let".split())
VERBS = set("""
accept add advance agree allow allocate answer appear apply ask assume attach avoid balance become begin believe belong bind block bound break
bring build call carry catch change check choose clear close collect come commit compare compile compress compute contain continue
convert copy correct cost count cover create cut decide decode decrease declare define delay delete deliver demand deny depend describe
detect differ disappear divide document double drop draw emit empty encode end enter equal exclude exist exit expect explain export
extend fail fall fill find finish fit fix flush fold follow forbid force forget free freeze gather generate get give go grow guard halt handle happen
hide hit hold idle ignore import include increase inherit insert install join judge keep kill know last lead learn leave lie limit link list
live load lock look lose lower make mark match matter mean measure meet mend merge mirror miss mix move name notice obey offer omit open
order outlive overflow overlap override overwrite own pack pad pair parse pass pause permit persist pick place plan point prefer prefetch prepare
preserve prevent print process produce promise propagate protect prove provide publish put queue quote raise ramp reach read receive
recognise recognize recompute record recover reduce refer refuse register reject release remember remove rename repeat replace
report reproduce request require reserve reset reshard resolve respect restart restore result resume retry return reuse rise rotate
round run save say scale scan search see select send separate serve set settle shard share shift show shrink skip sleep
sort spend split spread stand start state stay step stop store stream succeed sum support survive swap sync take tear terminate test
tie time tolerate touch trace track train translate travel treat truncate trust try turn understand undo unlink update use validate vanish
verify visit wait wake walk want warn weigh wipe work wrap write yield zero
""".split())
# Bases that are nouns as often: only their form with an s, or their place at the front of a subject, makes a clause.
NOUNS = set("""balance idle block bound break change check commit copy cost count cut demand document double drop draw end exit export fix
force guard import join limit link list load lock look mark match mean measure merge mirror move name offer order own pair pass pause pick
place plan point print process promise queue quote ramp record release report request reserve reset result return run save
scale search set shard share shift show sleep sort split spread start state step stop store stream sum support swap sync test tie time trace track
train trust try turn update use visit wait walk work wrap yield zero last live long empty clear close correct free lower open separate""".split())


def third(verb):
    """The form with an s.

    >>> third("carry"), third("pass"), third("keep"), third("go"), third("obey")
    ('carries', 'passes', 'keeps', 'goes', 'obeys')
    """
    if re.search(r"[^aeiou]y$", verb):
        return verb[:-1] + "ies"
    return verb + ("es" if re.search(r"(?:s|x|z|ch|sh|o)$", verb) else "s")


FINITE = AUXILIARIES | {third(v) for v in VERBS} | (VERBS - NOUNS)


def is_clause(text):
    """Whether a name says something: a finite verb, and no opening that makes it half of a sentence.

    >>> is_clause("a save cut off at any I/O call leaves the old checkpoint")
    True
    >>> is_clause("so it is with every option of the model"), is_clause("deaths of hosts, counted")
    (False, False)
    >>> is_clause("register arena memory with NCCL (--comm registered)"), is_clause("print times by op")
    (True, True)
    """
    words = re.findall(r"[A-Za-z][A-Za-z'-]*", text.lower())
    if not words or words[0] in ("of", "that", "those", "who", "whose", "what", "as", "so"):
        return False
    return words[0] in VERBS or any(word in FINITE for word in words)


def sentences(text):
    """The sentences of a paragraph.

    >>> list(sentences("Of this host, e.g. one. `That` is code. As in Lua. What it keeps"))
    ['Of this host, e.g. one.', 'is code.', 'As in Lua.', 'What it keeps']
    """
    text = re.sub(r"`[^`]*`", "", text)
    text = re.sub(r"\s+", " ", text).strip()
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])|(?<=[a-z]\.)\s{1,2}(?=is |are |has )", text):
        if sentence.strip():
            yield sentence.strip()


def broken(text, page=False):
    """The rules that a paragraph breaks, with the sentence.

    >>> [rule for rule, _ in broken("Of this host among those of its run. The run goes on with so many.")]
    ['R1', 'R4', 'R5']
    >>> [rule for rule, _ in broken("a slow pair is told of it; who leads is there alone, and nobody reads a bank")]
    ['R2', 'R2', 'R3', 'R6', 'R6', 'R8']
    >>> list(broken("A run resumes as the agent that leads it reports. People who change Cairn run tests. It tells steps and tokens apart."))
    []
    >>> [rule for rule, _ in broken("Run it on a double.", page=True)], list(broken("It fits a double."))
    (['R8'], [])
    >>> list(broken("As of now, a step takes double precision. The agent says who owns the slot, and the loop goes on a device."))
    []
    """
    for sentence in sentences(text):
        if OPENS.match(sentence) and not sentence.endswith("?"):
            yield "R1", sentence
        for rule, pattern in PATTERNS.items():
            for _ in pattern.finditer(sentence):
                yield rule, sentence
        for _ in STAND_IN.finditer(sentence) if page else ():
            yield "R8", sentence


TOKEN = re.compile(r'(?P<line>//[^\n]*)|(?P<block>/\*.*?\*/)|R"(?P<mark>[^(\s]*)\((?P<raw>.*?)\)(?P=mark)"|"(?P<text>(?:\\.|[^"\\\n])*)"'
                   r"|'(?:\\.|[^'\\\n])+'|(?P<digits>\d[\d']*)", re.S)


def of_code(source, messages):
    """(line, paragraph) of the comments and, if `messages`, the string literals of C++.

    >>> list(of_code('int a;  // one\\n// Two\\n// lines.\\nf("say this"\\n  " too", \\'"\\');', True))
    [(1, 'one'), (2, 'Two lines.'), (4, 'say this too')]
    """
    last, last_at, last_line, last_column, kind = "", 0, 0, 0, None
    before = 0
    for match in TOKEN.finditer(source):
        number = source.count("\n", 0, match.start()) + 1
        column = match.start() - source.rfind("\n", 0, match.start())
        between = source[before:match.start()]
        if match.group("line") is not None:
            what, text = "comment", re.sub(r"^//[/!<]*\s?", "", match.group("line"))
            joins = kind == what and (number, column) == (last_line + 1, last_column) and not between.strip() and text.strip()
        elif match.group("block") is not None:
            what, text, joins = "block", re.sub(r"(?m)^\s*\*", "", match.group("block")[2:-2]), False
        elif match.group("text") is not None and messages:
            what, text = "text", re.sub(r"\\.", " ", match.group("text"))
            joins = kind == what and not between.strip()
        elif match.group("raw") is not None and messages:
            what, text, joins = "raw", match.group("raw"), False
        else:
            continue
        if joins:
            last += ("" if what == "text" else " ") + text
        else:
            if last.strip():
                yield last_at, last.strip()
            last, last_at, kind = text, number, what
        last_line, last_column, before = number, column, match.end()
    if last.strip():
        yield last_at, last.strip()


def of_script(source, mark, docstrings):
    """(line, paragraph) of the comments of a script, and of a Python file's docstrings.

    >>> list(of_script('x = "#1"  # one\\n# Two\\n# three', "#", False))
    [(1, 'one'), (2, 'Two three')]
    """
    if docstrings:
        for match in re.finditer(r'"""(.*?)"""', source, re.S):
            yield source.count("\n", 0, match.start()) + 1, re.sub(r"(?m)^\s*(?:>>>|\.\.\.).*(?:\n.*)?$", "", match.group(1))
        source = re.sub(r'""".*?"""', lambda m: "\n" * m.group(0).count("\n"), source, flags=re.S)
    last, at, follows = "", 0, None
    comment = re.compile(rf"^(?P<before>\s*|(?:[^\"'#]|\"[^\"]*\"|'[^']*')*?\s){re.escape(mark)}(?!!)\s?(?P<text>.*)$")
    for number, line in enumerate(source.splitlines(), 1):
        match = comment.match(line)
        if not match:
            continue
        if last and (number, match.start("text")) == follows and match.group("text").strip():
            last += " " + match.group("text")
        else:
            if last.strip():
                yield at, last.strip()
            last, at = match.group("text"), number
        follows = number + 1, match.start("text")
    if last.strip():
        yield at, last.strip()


def of_page(source):
    """(line, paragraph) of a Markdown page, without code and headings; each cell of a table is one.

    >>> list(of_page("# What\\n\\none\\ntwo\\n\\n- That\\n| a | b |\\n```\\nx\\n```"))
    [(3, 'one two'), (6, 'That'), (7, 'a'), (7, 'b')]
    """
    text, at, fenced = "", 0, False
    for number, line in enumerate(source.splitlines() + [""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            line = ""
        if fenced or line.startswith("    ") and not text or line.startswith("#"):
            line = ""
        starts = re.match(r"\s*(?:[-*>]|\d+\.)\s+", line)
        if text and (not line.strip() or starts or line.startswith("|")):
            yield at, text
            text = ""
        if line.startswith("|"):
            for cell in line.strip("| \n").split(" | "):
                if re.search("[a-z]", cell):
                    yield number, cell.strip()
        elif line.strip():
            line = line[starts.end():] if starts else line.strip()
            text, at = (text + " " + line, at) if text else (line, number)


NAMES = re.compile(r'\b(?:TEST_CASE|SUBCASE|SCENARIO)\("((?:\\.|[^"\\])*)"')


def of_file(name, source):
    """(line, rule, sentence) for each rule that a file breaks."""
    path = pathlib.PurePosixPath(name)
    tests = name.startswith("tests/")
    found = []
    if path.suffix == ".md":
        found = of_page(source)
    elif path.suffix in CODE:
        found = of_code(source, not tests)
        if tests:
            found = list(found)
            for match in NAMES.finditer(source):
                number = source.count("\n", 0, match.start()) + 1
                found.append((number, match.group(1)))
                if not is_clause(match.group(1)):
                    yield number, "R7", match.group(1)
    elif path.suffix in COMMENT and (path.suffix or source.startswith("#!")) or path.name == "CMakeLists.txt":
        found = of_script(source, COMMENT.get(path.suffix, "#"), path.suffix == ".py")
    for number, paragraph in found:
        if " " in paragraph:
            for rule, sentence in broken(paragraph, path.suffix == ".md"):
                yield number, rule, sentence


def folder_of(name):
    """The folder to which a file counts: two levels.

    >>> folder_of("README.md"), folder_of("tools/run/hosts/fleet.h"), folder_of("runtime/cuda/nccl/x.cc")
    ('.', 'tools/run', 'runtime/cuda')
    """
    return "/".join(name.split("/")[:-1][:2]) or "."


def tracked(root):
    if names := git(root, "ls-files", "-z"):
        return [name for name in names.split("\0") if name]
    return [str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and "build" not in p.relative_to(root).parts[:1]]


def subjects(root):
    """(commit, subject) of what was committed since this script exists."""
    first = git(root, "log", "--diff-filter=A", "--format=%H", "--", "tests/prose.py").splitlines()
    if not first:
        return []
    lines = git(root, "log", "--no-merges", "--format=%h %s", f"{first[-1]}..HEAD").splitlines()
    return [line.split(" ", 1) for line in lines if " " in line]


def git(root, *words):
    p = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, errors="replace")
    return p.stdout if p.returncode == 0 else ""


def newer(root, found):
    """The broken sentences that the commit of the counts lacks."""
    base = git(root, "log", "-1", "--format=%H", "--", COUNTS).strip() or "HEAD"
    out = []
    for name in sorted({name for name, *_ in found}):
        before = collections.Counter((rule, sentence) for _, rule, sentence in of_file(name, git(root, "show", f"{base}:{name}")))
        for found_name, number, rule, sentence in found:
            if found_name != name:
                continue
            if before[rule, sentence] > 0:
                before[rule, sentence] -= 1
            else:
                out.append((name, number, rule, sentence))
    return out


def read_counts(path):
    counts = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split()
        if not words or words[0] == "folder":
            continue
        if len(words) != 1 + len(RULES) or not all(word.isdigit() for word in words[1:]):
            sys.exit(f"{path}:{number}: expected a folder and {len(RULES)} counts, found {line!r}")
        counts[words[0]] = dict(zip(RULES, map(int, words[1:])))
    return counts


def written(counts):
    rows = [("folder", *RULES)] + [(folder, *(str(counts[folder].get(rule, 0)) for rule in RULES)) for folder in sorted(counts)]
    width = max(len(row[0]) for row in rows)
    return "".join(row[0].ljust(width) + "".join(word.rjust(5) for word in row[1:]) + "\n" for row in rows)


def line_of(broken_sentence):
    name, number, rule, sentence = broken_sentence
    return f"{name}:{number}: {rule}: {sentence[:160]}"


def main(words):
    if doctest.testmod(sys.modules[__name__]).failed:
        return 1
    root = pathlib.Path(words[0]).resolve()
    found = collections.defaultdict(list)
    for name in tracked(root):
        path = root / name
        if name in GENERATED or not path.is_file() or path.is_symlink():
            continue
        source = path.read_bytes().decode(errors="replace")
        for number, rule, sentence in of_file(name, source):
            found[folder_of(name), rule].append((name, number, rule, sentence))
    if "--list" in words:
        wanted = words[words.index("--list") + 1].rstrip("/")
        for key in sorted(key for key in found if key[0] == wanted):
            print("\n".join(map(line_of, found[key])))
        return 0
    now = {}
    for (folder, rule), lines in found.items():
        now.setdefault(folder, {})[rule] = len(lines)
    path = root / COUNTS
    before = read_counts(path) if path.is_file() else None
    bad = 0
    for commit, subject in subjects(root):
        area, colon, what = subject.partition(": ")
        if len(subject) > 72 or not colon or not is_clause(what):
            print(f"{commit}: R7: {subject!r}: expected `area: what changes`, with a verb, in at most 72 characters")
            bad += 1
    higher = False
    for rule in RULES if before is not None else ():
        higher |= sum(counts.get(rule, 0) for counts in now.values()) > sum(counts[rule] for counts in before.values())
    if before is None and "--update" not in words:
        print(f"{COUNTS} is missing: take it from the repository")
        return 1
    if "--update" in words:
        if higher:
            print(f"{COUNTS} is left as it is: a rule is broken more often than before (without --update, the places are printed)")
            return 1
        path.write_text(written(now), encoding="utf-8")
        return 1 if bad else 0
    for folder in sorted(set(now) | set(before)):
        for rule in RULES:
            is_now, was = now.get(folder, {}).get(rule, 0), before.get(folder, {}).get(rule, 0)
            if is_now == was:
                continue
            bad += 1
            if is_now < was:
                print(f"{folder}: {rule}: {was} before, {is_now} now: lower the count by `python3 tests/prose.py . --update`")
                continue
            print(f"{folder}: {rule}: {was} before, {is_now} now: {SAY[rule]}")
            print("\n".join(f"    {line_of(one)}" for one in newer(root, found[folder, rule]) or found[folder, rule]))
    total = sum(sum(counts.values()) for counts in now.values())
    print(f"{total} sentences break a rule, {bad} counts or subjects differ from {COUNTS}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
