"""Tests of ptxas_bounds.py on what nvcc prints, without a toolkit."""
import pathlib
import tempfile
import unittest

import ptxas_bounds

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN1a6kernelILi8EEEvT_' for 'sm_80'
ptxas info    : Function properties for _ZN1a6kernelILi8EEEvT_
    {stack} bytes stack frame, {stores} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers, 376 bytes cmem[0]
"""


def wrong(bound, stack=0, stores=0, same_toolkit=True):
    (name, arch, *numbers), = ptxas_bounds.kernels_of(LOG.format(stack=stack, stores=stores))
    return ptxas_bounds.check({name: {arch: tuple(numbers)}}, {name: {"80": bound}} if bound else {}, same_toolkit)


class Bounds(unittest.TestCase):
    def test_at_and_above_a_bound(self):
        self.assertEqual(wrong(30), [])
        self.assertIn("30 registers, bound 29", wrong(29)[0])

    def test_stack_and_spills_count_whatever_the_toolkit(self):
        for same in (True, False):
            self.assertIn("8 bytes of stack, 0 of spills", wrong(30, stack=8, same_toolkit=same)[0])
            self.assertIn("8 bytes of stack, 4 of spills", wrong(30, stack=8, stores=4, same_toolkit=same)[0])
        self.assertEqual(wrong(29, same_toolkit=False), [])

    def test_each_kernel_has_a_bound_and_each_bound_a_kernel(self):
        self.assertIn("no bound", wrong(None)[0])
        self.assertEqual(ptxas_bounds.check({}, {"gone": {"80": 1}}, True), ["gone: a bound of no kernel"])

    def test_a_kernel_is_compiled_for_each_architecture_of_its_bounds(self):
        compiled, bounds = {"one": {"80": (1, 0, 0)}}, {"one": {"80": 1, "120": 1}}
        self.assertEqual(ptxas_bounds.check(compiled, bounds, True), ["one (sm_120): a bound, and it is not compiled for it"])

    def test_code_for_one_card_alone_has_an_architecture_of_its_own(self):
        log = LOG.format(stack=0, stores=0).replace("sm_80", "sm_90a")
        self.assertEqual([kernel[1] for kernel in ptxas_bounds.kernels_of(log)], ["90a"])
        self.assertEqual(sorted(["120", "90a", "80", "90"], key=ptxas_bounds.in_order), ["80", "90", "90a", "120"])

    def test_products_that_are_serialized_are_wrong(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "one.cu").touch()
            log = LOG.format(stack=0, stores=0)
            (folder / "one.cu.o.log").write_text(log)
            self.assertEqual(ptxas_bounds.read(folder, [folder])[1], [])
            (folder / "one.cu.o.log").write_text(log + "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async "
                                                 "instructions are serialized due to X in the function '_ZN1a6kernelILi8EEEvT_'\n")
            self.assertRegex(ptxas_bounds.read(folder, [folder])[1][0], "^.*kernel<8>: its products are serialized$")

    def test_names_lose_what_changes_from_build_to_build(self):
        self.assertEqual(ptxas_bounds.short("void cairn::kernels::cuda::map_packs<8, cairn::kernels::cuda::(anonymous "
                                            "namespace)::Both<cairn::f16> >(cairn::X<(int)1>, long)"),
                         "map_packs<8, Both<f16> >")


if __name__ == "__main__":
    unittest.main()
