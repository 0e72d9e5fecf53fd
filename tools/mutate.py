"""Mutation testing of the pure core: makes one small change at a time and asks whether `make check` notices.

    python tools/mutate.py --count 100 --seed 1

Each mutation changes one expression or statement of a file in PACKAGES, in a copy of the working tree. It is
killed when a test of `make check` fails or takes too long: a unit test that imports the changed module, or a
seed of the simulator, or a test in tests/sim. Exits with 1 when fewer than --least percent are killed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import importlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("handoff", "kvcache", "engine", "worker/decode", "worker/prefill")
LEFT_OUT = ("cuda_", "timed_runner")
"""Beginnings of names of modules that run on GPUs only."""
SHELLS = ("server", "measure")
"""Modules that only processes run: tests/contract and tests/cluster are theirs."""
FIRST_SEEDS = 20
"""Run before the unit tests, because they take a second."""
MEMORY_BYTES = 6 << 30
"""Limit of a check: a loop that never ends may fill the memory."""
LIBRARIES = ("numpy", "torch", "pytest", "hypothesis", "grpc.aio", "google.rpc.status_pb2")
"""Imported once, before the forks."""
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
FUNCTIONS = {"max": "min", "min": "max", "any": "all", "all": "any"}


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Small changes of one expression or statement."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        yield from (
            ast.BoolOp(node.op, [*node.values[:i], *node.values[i + 1 :]])
            if len(node.values) > 2
            else node.values[1 - i]
            for i in range(len(node.values))
        )
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        yield ast.Call(ast.Name(FUNCTIONS[node.func.id], ast.Load()), node.args, node.keywords)
        yield from node.args[:1]
    elif isinstance(node, ast.If | ast.While):
        yield type(node)(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        if isinstance(node, ast.If):
            yield ast.If(ast.Constant(False), node.body, node.orelse)
    elif isinstance(node, ast.AugAssign):
        yield ast.Assign([node.target], node.value)
        yield ast.Pass()
    elif isinstance(node, ast.Delete | ast.Assign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()


def runs(tree: ast.Module) -> Iterator[ast.AST]:
    """What runs: neither assertions and messages of errors, nor annotations and decorators, nor a module's
    constants."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.keyword) and node.arg == "strict":  # zip's assertion
            continue
        if isinstance(node, ast.Module):
            waiting += [child for child in node.body if not isinstance(child, ast.Assign | ast.AnnAssign)]
            continue
        yield node
        if isinstance(node, ast.AnnAssign):
            waiting += [node.value] if node.value is not None else []
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += node.body if node.name not in ("__str__", "__repr__") else []
        elif isinstance(node, ast.ClassDef):
            waiting += node.body
        else:
            waiting += ast.iter_child_nodes(node)


class Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else super().generic_visit(node)


def mutations() -> Iterator[tuple[Path, ast.Module, ast.AST, ast.AST]]:
    """All there are: file, its tree, the node, what takes its place."""
    for package in PACKAGES:
        if not (paths := sorted((ROOT / "services/baton" / package).glob("*.py"))):
            raise SystemExit(f"services/baton/{package} has no files: has it been moved?")
        for path in paths:
            if path.stem.startswith(LEFT_OUT) or path.stem in SHELLS:
                continue
            tree = ast.parse(path.read_text())
            for node in runs(tree):
                yield from ((path, tree, node, ast.fix_missing_locations(new)) for new in variants(node))


@functools.cache
def imports(path: Path) -> set[str]:
    """Modules of Baton, and names in them, that a file imports, itself or by a helper beside it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            helper = path.with_name(f"{node.module}.py")
            if node.module.startswith("baton"):
                found.update((node.module, *(f"{node.module}.{name.name}" for name in node.names)))
            elif "tests" in path.parts and helper.exists():
                found |= imports(helper)
    return found


def tests_of(there: Path, path: Path) -> list[str]:
    """Unit tests of a module: those named after it or importing it, then those that import a module which
    imports it."""
    services = there / "services"
    module = ".".join(path.relative_to(ROOT / "services").with_suffix("").parts)
    names = {module, module.rpartition(".")[0]}
    users = {
        ".".join(file.relative_to(services).with_suffix("").parts)
        for file in (services / "baton").rglob("*.py")
        if names & imports(file)
    }
    ranked = []
    for test in (there / "tests/unit").glob("test_*.py"):
        used = imports(test)
        near = names & used or path.stem in test.stem
        if near or users & used:
            ranked.append((not near, len(used), str(test.relative_to(there))))
    return [test for _, _, test in sorted(ranked)]


def run_tests(tests: list[str]) -> bool:
    import hypothesis
    import pytest

    # A failing example is enough; the smallest takes long to find.
    hypothesis.settings.register_profile("any", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
    hypothesis.settings.load_profile("any")
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not alone and not thorough"]
    return pytest.main([*options, *tests]) in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def run_seeds(seeds: range) -> bool:
    from baton.sim.run import run_seed

    return not any(run_seed(seed).failure for seed in seeds)


def passes(there: Path, what: Callable[[], bool], seconds: int) -> bool:
    """Runs a check of the tree `there` in a fork of this process, which has imported all libraries. It may
    take `seconds` of CPU time, and ten times as long on a busy machine."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(there)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        sys.path[:0] = [str(there / "services"), str(there)]
        os.environ["PYTHONPATH"] = str(there / "services")
        sys.dont_write_bytecode = True
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        code = 1
        try:
            code = 0 if what() else 1
        finally:
            os._exit(code)
    deadline = time.monotonic() + 10 * seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def killed_by(there: Path, path: Path, seconds: int) -> str:
    """Which check fails in the tree `there`; empty: none. What is likely to fail soon comes first."""
    if not passes(there, lambda: run_seeds(range(FIRST_SEEDS)), seconds):
        return "a seed"
    for test in (*tests_of(there, path), "tests/sim"):
        if not passes(there, lambda test=test: run_tests([test]), seconds):  # type: ignore[misc]
            return test
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="mutations to try")
    parser.add_argument("--seed", type=int, default=1, help="of the choice among all mutations")
    parser.add_argument("--seconds", type=int, default=100, help="of CPU time that a check may take")
    parser.add_argument(
        "--part", default="1/1", help="2/4: the second quarter of them, to run all side by side"
    )
    parser.add_argument("--least", type=int, default=90, help="percent that must be killed")
    parser.add_argument("--files", default="", help="only files whose path contains this")
    options = parser.parse_args()
    every = [mutation for mutation in mutations() if options.files in str(mutation[0].relative_to(ROOT))]
    chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
    part, parts = map(int, options.part.split("/"))
    chosen = chosen[part - 1 :: parts]
    killed = 0
    for library in LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        there = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache", "node_modules")
        shutil.copytree(ROOT, there, ignore=ignored)
        for number, (path, tree, old, new) in enumerate(chosen, 1):
            place = there / path.relative_to(ROOT)
            line = getattr(old, "lineno", 0)
            original = place.read_text()
            change = f"{ast.unparse(old).splitlines()[0]}  ->  {ast.unparse(new).splitlines()[0]}"
            nodes = list(ast.walk(tree))
            changed = copy.deepcopy(tree)
            target = list(ast.walk(changed))[nodes.index(old)]
            place.write_text(ast.unparse(ast.fix_missing_locations(Replace(target, new).visit(changed))))
            killer = killed_by(there, path, options.seconds)
            place.write_text(original)
            killed += bool(killer)
            verdict = f"killed by {killer}" if killer else "SURVIVES"
            print(f"{number} {path.relative_to(ROOT)}:{line}: {change}: {verdict}", flush=True)
    print(f"{killed} of {len(chosen)} mutations killed")
    return 0 if 100 * killed >= options.least * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
