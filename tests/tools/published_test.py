"""Every recipe that is shipped, as a person would try it: `cairn check --recipe-only`, then `cairn plan`.

Published ones by the commands at their heads, against docs/published-recipes.md (tests/dsl/published_test.cc has more).
"""

import pathlib
import re
import shlex

from program import ProgramTest, main

TREE = pathlib.Path(__file__).resolve().parents[2]
RECIPES = TREE / "recipes"
CARD_GIB = {"A100-80": 80, "H100-80": 80, "H800-80": 80, "A100-40": 40, "Ascend 910": 32}


def commands(recipe):
    """The `cairn plan` lines of the comment that a recipe begins with, as lists of arguments behind `plan`."""
    head = re.match(r"(--.*\n)*", recipe.read_text()).group()
    return [shlex.split(line) for line in re.findall(r"^--   cairn plan (.*)$", head, re.MULTILINE)]


def table():
    """Rows of the page, by (recipe with its options, world)."""
    rows = {}
    for line in (TREE / "docs" / "published-recipes.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) > 2 and cells[1].startswith("`"):
            recipe, world = cells[1].strip("`"), int(cells[3].replace(",", ""))
            rows[recipe, world] = {"parameters": int(cells[2].replace(",", "")), "rank_gib": float(cells[8]),
                                   "card_gib": CARD_GIB[cells[9].removesuffix(" (ours)")]}
    return rows


class PublishedTest(ProgramTest):
    def test_published_recipes_plan_at_once_by_the_commands_at_their_heads(self):
        rows = table()
        unit_s = self.small_plan_s()
        tried = set()
        recipes = sorted((RECIPES / "published").glob("*.lua"))
        self.assertGreater(len(recipes), 10)
        for recipe in recipes:
            lines = commands(recipe)
            self.assertTrue(lines, f"{recipe.name} does not say at its head how to plan it")
            for path, *args in lines:
                with self.subTest(recipe.name, args=args):
                    self.assertEqual(TREE / path, recipe)
                    self.cairn("check", TREE / path, *args, "--recipe-only")
                    plan, seconds = self.cpu_seconds(lambda: self.cairn_json("plan", TREE / path, *args))
                    self.assertLess(seconds, 70 * unit_s)  # the most: 23, of thousands of ranks with a ramp
                    at = args.index("--world")
                    world = int(args[at + 1])
                    key = " ".join([recipe.name, *args[:at], *args[at + 2:]]), world
                    tried.add(key)
                    row = rows[key]
                    self.assertEqual(plan["world"], world)
                    self.assertEqual(plan["parameters"], row["parameters"])
                    self.assertEqual(plan["checkpoint"]["bytes"], 12 * row["parameters"])
                    fullest = max(stage["rank_bytes"] for stage in plan["stages"]) / (1 << 30)
                    self.assertLess(fullest, row["card_gib"])
                    self.assertAlmostEqual(fullest, row["rank_gib"], delta=0.05 * row["rank_gib"])
        untried = {recipe for recipe, _ in rows.keys() - tried}
        self.assertEqual({recipe.split()[0] for recipe in untried}, {"megatron_gpt.lua"})  # its head has two of ten

    def test_recipes_to_start_from_are_checked_and_planned(self):
        recipes = sorted(RECIPES.glob("*.lua"))
        self.assertGreater(len(recipes), 5)
        for recipe in recipes:
            with self.subTest(recipe.name):
                self.cairn("check", recipe, "--recipe-only")
                plan = self.cairn_json("plan", recipe)
                self.assertGreater(plan["parameters"], 0)
                self.assertGreater(plan["steps"], 0)


if __name__ == "__main__":
    main()
