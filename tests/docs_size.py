"""Pages for users stay short: their sum, each page, README.md. Words are what `wc -w` counts, without generated tables.
Prints each page above its limit."""
import doctest
import pathlib
import re
import sys

SUM, PAGE, README = 45_000, 3_000, 900
# Pages that are not for users: generated ones, those for contributors, and the measurements.
GENERATED = {"commands", "recipe", "published-recipes", "cluster-file"}
CONTRIBUTORS = {"architecture", "building", "decisions", "folders", "adding-a-family", "format", "cuda", "cuda-communication", "cuda-steps",
                "cuda-tests", "hosts-protocol"}
LIMITS = {"benchmarks": 2_500, "comparison": 1_200}


def words(text):
    """The words of a page without its generated tables.

    >>> words("a b\\n<!-- generated from x -->\\n| c |\\n| d |\\n\\ne")
    3
    """
    return len(re.sub(r"(?m)^<!-- generated.*\n(?:\|.*\n)*", "", text).split())


def for_users(sizes):
    return {page: n for page, n in sizes.items() if page not in GENERATED | CONTRIBUTORS | {"benchmarks"}}


def too_long(sizes):
    """The limits that {page: words} exceeds; a page is a path below docs without its ending, or README.

    >>> too_long({"README": 900, "a": 3000, "recipe": 14000, "cuda": 3001, "benchmarks": 2500})
    []
    >>> too_long({"README": 901, "a": 3001})
    ['README: 901 words, at most 900', 'a: 3001 words, at most 3000']
    >>> too_long({"comparison": 1201})
    ['comparison: 1201 words, at most 1200']
    >>> too_long({f"operations/{k}": 3000 for k in range(16)})
    ["users' pages: 48000 words, at most 45000"]
    """
    users = for_users(sizes)
    limits = {**{page: PAGE for page in users}, "README": README, **LIMITS}
    found = [f"{page}: {sizes[page]} words, at most {limit}" for page, limit in sorted(limits.items()) if sizes.get(page, 0) > limit]
    if sum(users.values()) > SUM:
        found.append(f"users' pages: {sum(users.values())} words, at most {SUM}")
    return found


def main():
    root = pathlib.Path(sys.argv[1])
    docs = root / "docs"
    sizes = {str(path.relative_to(docs).with_suffix("")): words(path.read_text(encoding="utf-8")) for path in docs.rglob("*.md")}
    sizes["README"] = words((root / "README.md").read_text(encoding="utf-8"))
    found = too_long(sizes)
    found += [f"{page}: no such page; take it off the lists of this test" for page in sorted((GENERATED | CONTRIBUTORS | set(LIMITS)) - set(sizes))]
    for one in found:
        print(one)
    users = for_users(sizes)
    print(f"{len(users)} pages for users, {sum(users.values())} words; {len(found)} wrong")
    sys.exit(1 if found or doctest.testmod().failed else 0)


main()
