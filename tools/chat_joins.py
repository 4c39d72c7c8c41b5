#!/usr/bin/env python3
"""A tokenizer's chat_template as the table of joins that `cairn data chat --chat FILE` takes.

  tools/chat_joins.py HF_DIR [--template FILE] > joins.json

A template is a program; nearly all of them write the same text between two roles whatever the turns say. This finds
those texts by rendering conversations, and then proves the table on others that it has not seen: 12 turns, with and
without a system turn, spaces around contents, braces, three scripts. Nothing is written unless all of them are equal
(exit code 1 names the first that is not). Needs the transformers package that the model is used with.
"""

import argparse
import hashlib
import json
import pathlib
import random
import sys

BEGIN, END = "begin", "end"
MARKS = [f"Q{k}cairn{k}Z" for k in range(16)]  # contents that no template writes itself
PROBES = [["user", "assistant"],
          ["user", "assistant", "user", "assistant"],
          ["system", "user", "assistant"],
          ["system", "user", "assistant", "user", "assistant"],
          ["user"],
          ["system", "user"],
          ["user", "assistant", "user"]]
# A conversation without these is none; others a template may refuse, and then their joins are not in the table.
NEEDED = PROBES[:2]


class NoTable(Exception):
    """The template is no table of joins; its text says which part depends on more."""


def messages(roles, contents):
    return [{"role": role, "content": content} for role, content in zip(roles, contents)]


def try_render(render, roles, contents, **more):
    """The text, or None where the template refuses the roles."""
    try:
        return render(messages(roles, contents), **more)
    except Exception:  # templates raise by a function of their own, jinja2 by several classes
        return None


def cut(text, contents):
    """The texts before, between and behind the contents."""
    parts, at = [], 0
    for content in contents:
        if text.count(content) != 1:
            raise NoTable(f"a content is written {text.count(content)} times: {text!r}")
        found = text.find(content, at)
        if found < 0:
            raise NoTable(f"contents are written in another order: {text!r}")
        parts.append(text[at:found])
        at = found + len(content)
    return parts + [text[at:]]


def derive(render):
    """render(messages, add_generation_prompt=False) -> text. Returns {"joins", "trim", "generate"}; raises NoTable."""
    joins, trim, kept = {}, set(), set()
    for roles in PROBES:
        text = try_render(render, roles, MARKS)
        if text is None:
            if roles in NEEDED:
                raise NoTable(f"the template refuses turns of {', '.join(roles)}")
            continue
        parts = cut(text, MARKS[:len(roles)])
        around = [BEGIN] + roles + [END]
        for pair, part in zip(zip(around, around[1:]), parts):
            key = " ".join(pair)
            if joins.setdefault(key, part) != part:
                raise NoTable(f"the text between {key!r} depends on more than the two roles: {joins[key]!r} and {part!r}")
    for roles in PROBES:
        spaced = [f" \n {mark} \n " for mark in MARKS]
        text = try_render(render, roles, spaced)
        if text is None:
            continue
        around = roles + [END]
        at = len(joins[f"{BEGIN} {roles[0]}"])
        for k, role in enumerate(roles):
            key = f"{role} {around[k + 1]}"
            whole, bare = spaced[k] + joins[key], MARKS[k] + joins[key]
            if text.startswith(whole, at):
                kept.add(key)
                at += len(whole)
            elif text.startswith(bare, at):
                trim.add(key)
                at += len(bare)
            else:
                raise NoTable(f"spaces around the content of {key!r} are neither kept nor stripped: {text!r}")
        if kept & trim:
            raise NoTable(f"spaces of {sorted(kept & trim)[0]!r} are kept in one place and stripped in another")
    asked = try_render(render, ["user"], MARKS, add_generation_prompt=True)
    generate = "" if asked is None else asked[asked.find(MARKS[0]) + len(MARKS[0]):]
    return {"joins": dict(sorted(joins.items())), "trim": sorted(trim), "generate": generate}


def joined(table, conversation):
    """The text that `cairn data chat` makes of it."""
    out, before = "", BEGIN
    roles = [turn["role"] for turn in conversation] + [END]
    for k, turn in enumerate(conversation):
        content = turn["content"].strip() if f"{turn['role']} {roles[k + 1]}" in table["trim"] else turn["content"]
        out += table["joins"][f"{before} {turn['role']}"] + content
        before = turn["role"]
    return out + table["joins"][f"{before} {END}"]


def held_out(table, seed=1):
    """Conversations that the table was not made from."""
    draw = random.Random(seed)
    words = ["the", "river", "{{ braces }}", "{% if x %}", "\u03b1\u03b2\u03b3", "\u6c34\u706b", "\u0434\u043e\u043c",
             "a\nb", "1 + 1 = 2", "\\n", "</think", "'quote\"", "<b>", "end.", "\u00e9\u0301"]
    for number in range(60):
        turns = 12 if number % 3 == 0 else draw.choice([2, 4, 6])
        roles = ["user", "assistant"] * (turns // 2)
        if number % 2 == 1 and "begin system" in table["joins"]:
            roles = ["system"] + roles
        if number % 5 == 4 and "user end" in table["joins"]:
            roles = roles[:-1]
        contents = []
        for _ in roles:
            text = " ".join(draw.choice(words) for _ in range(draw.randint(1, 9)))
            contents.append(draw.choice(["", "", " ", "\n", "\t "]) + text + draw.choice(["", "", " ", "\n\n"]))
        yield messages(roles, contents)


def prove(table, render):
    """Raises NoTable with the first conversation that the table writes otherwise."""
    for conversation in held_out(table):
        wanted = render(conversation)
        got = joined(table, conversation)
        if got == wanted:
            continue
        at = next((k for k, (a, b) in enumerate(zip(got, wanted)) if a != b), min(len(got), len(wanted)))
        raise NoTable(f"a conversation of {len(conversation)} turns is written otherwise from character {at} on: the template "
                      f"has {wanted[max(0, at - 40):at + 40]!r}, the table {got[max(0, at - 40):at + 40]!r}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="HF_DIR", help="folder of the tokenizer")
    parser.add_argument("--template", metavar="FILE", help="a chat template in place of the tokenizer's")
    args = parser.parse_args()
    try:
        import transformers
    except ImportError:
        sys.exit("chat_joins.py: needs the Python package transformers: pip install transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
    if args.template:
        tokenizer.chat_template = pathlib.Path(args.template).read_text()
    template = tokenizer.chat_template
    if not isinstance(template, str):
        sys.exit(f"chat_joins.py: {args.folder}: the tokenizer has {'no chat template' if template is None else 'several'}; "
                 "name one by --template FILE")
    if "strftime_now" in template or "date_string" in template:
        print("chat_joins.py: the template writes a date: the table keeps today's", file=sys.stderr)

    def render(conversation, **more):
        return tokenizer.apply_chat_template(conversation, tokenize=False, **more)

    try:
        table = derive(render)
        prove(table, render)
    except NoTable as reason:
        sys.exit(f"chat_joins.py: the template is no table of joins: {reason}\n"
                 "Make rows of \"ids\" and \"loss\" with the template itself instead (cairn data chat --help).")
    table["made"] = {"template": hashlib.sha256(template.encode()).hexdigest(), "transformers": transformers.__version__}
    json.dump(table, sys.stdout, indent=2, ensure_ascii=False)
    print()


if __name__ == "__main__":
    main()
