"""Defects at the seam to people's modules: what a copy of a module follows."""

from ..planting import Defect

_SEAMS = "tests/models/test_seams.py"
_HELD = f"{_SEAMS}::test_what_holds_parts_of_a_module_trains_as_in_torch"
_GRAPH = "tests/execute/test_graph.py"
_DONE = f"{_SEAMS}::test_what_is_done_to_the_module_is_done_to_its_copies"

DEFECTS = (
    Defect(
        "functions that stay the original's",
        "stale",
        "models/copying.py",
        "closures in a copied module go on calling the original's layers, which are never trained",
        "made = self._function(value) if self.holds_parts(value) else value",
        "made = value",
        (_HELD,),
    ),
    Defect(
        "defaults that stay the original's",
        "stale",
        "models/copying.py",
        "default arguments of a function in a copied module hold the original's layers",
        "made.__defaults__, made.__kwdefaults__ = self(function.__defaults__), self(function.__kwdefaults__)",
        "made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__",
        (f"{_HELD}[defaults-0]",),
    ),
    Defect(
        "lists that change in place",
        "stale",
        "models/originals.py",
        "a list of a module that is written to in place is not followed",
        "isinstance(inside, dict | list) and key not in NO_ATTRIBUTES",
        "isinstance(inside, dict) and key not in NO_ATTRIBUTES",
        (f"{_DONE}[a list in place]",),
    ),
    Defect(
        "buffers that change in place",
        "stale",
        "models/originals.py",
        "a buffer of a module that is written to in place is not followed",
        "0 if leaf is None or leaf.is_inference() else version_of(leaf)",
        "0",
        (f"{_DONE}[a buffer in place]",),
    ),
    Defect(
        "an evaluation that trains",
        "choice",
        "evaluate.py",
        "make_eval_step runs modules in the mode that they are in, with dropout",
        "        with evaluating():\n            return self._runner",
        "        if True:\n            return self._runner",
        (f"{_SEAMS}::test_modes_and_methods_of_a_call",),
    ),
    Defect(
        "an evaluation under torch.func that trains",
        "choice",
        "evaluate.py",
        "an eval step inside of torch.func runs modules in the mode that they are in, with dropout",
        "        with evaluating():\n            if not isinstance",
        "        if True:\n            if not isinstance",
        (f"{_SEAMS}::test_modes_and_methods_of_a_call",),
    ),
    Defect(
        "hooks that are not linear",
        "factor",
        "models/parameter_hooks.py",
        "a hook that clips runs on each part of a gradient, before their sum",
        "found, wanted = result(other - 3 * gradient), result(other) - 3 * result(gradient)",
        "found, wanted = result(gradient), result(gradient)",
        (f"{_SEAMS}::test_hooks_that_cannot_run_are_refused",),
    ),
    Defect(
        "every micro-batch of a graph draws as the first",
        "offset",
        "execute/graph/keys.py",
        "a graph is given the first element's index in place of this micro-batch's",
        "found += [signed(seed), first]",
        "found += [signed(seed), 0]",
        (f"{_GRAPH}::test_a_gpt",),
    ),
    Defect(
        "random numbers of a trace for all steps",
        "stale",
        "execute/graph/twice.py",
        "what a loss draws by Python's random becomes a constant of its graph",
        "if now != python:",
        "if now is None:",
        (f"{_GRAPH}::test_what_would_be_a_constant_is_refused_by_name",),
    ),
    Defect(
        "a graph that computes otherwise the second time",
        "stale",
        "execute/graph/twice.py",
        "what changes from call to call and is no tensor becomes a constant of a graph",
        "if before != now:",
        "if before is None:",
        (f"{_GRAPH}::test_what_would_be_a_constant_is_refused_by_name",),
    ),
    Defect(
        "a module as it was traced",
        "stale",
        "execute/graph/runner.py",
        "a graph goes on as a module was before eval(), or another dropout.p",
        "if any(module.differs() for module in self._modules):",
        "if not self._modules and any(module.differs() for module in self._modules):",
        (f"{_GRAPH}::test_what_is_done_to_a_module_is_done_in_its_graph",),
    ),
    Defect(
        "a first call around torch.func that nobody looks at",
        "choice",
        "execute/values/function.py",
        "writes to parameters, and uses of slices that fit and are wrong, go through where torch.func is around",
        "nullcontext() if self._looked else",
        "nullcontext() if self._looked or self.mesh else",
        ("tests/execute/test_func_around.py::test_writes_to_parameters_are_refused",),
    ),
)
