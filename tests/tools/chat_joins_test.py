"""tools/chat_joins.py: tables of what templates write, and templates that are none. Templates are functions here; the page
docs/chat.md says which real ones were tried."""

import importlib.util
import pathlib
import sys
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "tools" / "chat_joins.py"
spec = importlib.util.spec_from_file_location("chat_joins", SCRIPT)
chat_joins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(chat_joins)


def chatml(turns, add_generation_prompt=False):
    text = "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in turns)
    return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def brackets(turns, add_generation_prompt=False):
    """A system turn stands within the first of the user; contents are stripped; roles must take turns."""
    text, turns = "<s>", list(turns)
    system = turns.pop(0)["content"] if turns[0]["role"] == "system" else None
    for k, turn in enumerate(turns):
        if turn["role"] != ("user", "assistant")[k % 2]:
            raise ValueError("roles must take turns")
        content = turn["content"].strip()
        if turn["role"] == "assistant":
            text += f" {content} </s>"
            continue
        before = f"<<SYS>>\n{system}\n<</SYS>>\n\n" if k == 0 and system is not None else ""
        text += f"[INST] {before}{content} [/INST]"
    return text


def strips_but_last(turns, add_generation_prompt=False):
    out = ""
    for k, turn in enumerate(turns):
        strip = turn["role"] == "assistant" and k + 1 < len(turns)
        out += f"<{turn['role']}>" + (turn["content"].strip() if strip else turn["content"]) + "</s>"
    return out


def thinks_in_the_last(turns, add_generation_prompt=False):
    return "".join(f"<{t['role']}>" + ("<think></think>" if t["role"] == "assistant" and k + 1 == len(turns) else "") +
                   t["content"] + "</s>" for k, t in enumerate(turns))


def collapses_spaces(turns, add_generation_prompt=False):
    return "".join(f"<{t['role']}>{' '.join(t['content'].split())}</s>" for t in turns)


def strips_one_side(turns, add_generation_prompt=False):
    return "".join(f"<{t['role']}>{t['content'].lstrip()}</s>" for t in turns)


def looks_at_a_content(turns, add_generation_prompt=False):
    return "".join(f"<{t['role']}>{t['content']}</s>" + ("!" if "braces" in t["content"] else "") for t in turns)


def refuses(turns, add_generation_prompt=False):
    raise ValueError("no")


class ChatJoins(unittest.TestCase):
    def test_templates_that_are_tables(self):
        for template, trims in ((chatml, []), (brackets, ["assistant end", "assistant user", "user assistant", "user end"]),
                                (strips_but_last, ["assistant user"])):
            with self.subTest(template.__name__):
                table = chat_joins.derive(template)
                chat_joins.prove(table, template)
                self.assertEqual(table["trim"], trims)
        table = chat_joins.derive(chatml)
        self.assertEqual(table["joins"]["assistant user"], "<|im_end|>\n<|im_start|>user\n")
        self.assertEqual(table["generate"], "<|im_end|>\n<|im_start|>assistant\n")
        self.assertEqual(chat_joins.derive(brackets)["joins"]["begin system"], "<s>[INST] <<SYS>>\n")

    def test_templates_that_are_none_say_which_part(self):
        for template, text in ((thinks_in_the_last, "'user assistant' depends on more"),
                               (strips_one_side, "neither kept nor stripped"), (refuses, "refuses turns of user, assistant")):
            with self.subTest(template.__name__), self.assertRaisesRegex(chat_joins.NoTable, text):
                chat_joins.derive(template)
        for template in (looks_at_a_content, collapses_spaces):  # probes cannot see it, conversations held out do
            with self.subTest(template.__name__), self.assertRaisesRegex(chat_joins.NoTable, "is written otherwise"):
                chat_joins.prove(chat_joins.derive(template), template)


if __name__ == "__main__":
    sys.argv = sys.argv[:1]  # the program's path is of no use here
    unittest.main(verbosity=2)
