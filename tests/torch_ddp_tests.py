"""PyTorch's own DDP tests, with gradientflow.DistributedDataParallel in the place of the class they were written for.

The tests ship inside the torch wheel (torch.testing._internal.distributed). They run here on CPU with Gloo, one at a
time, every rank a process.

    python tests/torch_ddp_tests.py                   # gradientflow's class
    python tests/torch_ddp_tests.py --stock           # torch's class: which tests run on this machine at all
    python tests/torch_ddp_tests.py --pretend-gpus    # the tests written for GPUs too, every device being the CPU
    python tests/torch_ddp_tests.py -k join -v        # some of them, with what the ranks of a failed one wrote

Nothing is chosen by hand: every test runs that constructs DDP, itself or through what it calls. A test that fails with
gradientflow's class runs again with torch's; it counts against us only if torch's passes.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import faulthandler
import functools
import importlib
import inspect
import json
import os
import re
import signal
import sys
import tempfile
import textwrap
import time
import traceback
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

# Tests of how torch's class works inside, or of an error it raises where gradientflow's goes on working.
NOT_APPLICABLE = {
    "test_ddp_logging_data_cpu": "reads some forty fields of the C++ logger: rebuilt buckets, sampled nanoseconds",
    "test_ddp_apply_optim_in_backward": "an optimizer inside backward is refused, with what to do instead",
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": "an optimizer inside backward is refused",
    "test_ddp_apply_optim_in_backward_ignored_params": "an optimizer inside backward is refused",
    "test_ddp_broadcast_buffer_via_hook": "private hooks on buffers are refused, with what to do instead",
    "test_ddp_bucket_cap_mb_list": "bucket_cap_mb_list is refused: a recipe says more",
    "test_ddp_buffer_hook_allreduce": "private hooks on buffers are refused",
    "test_ddp_buffer_hook_allreduce_return_future": "private hooks on buffers are refused",
    "test_ddp_device_mesh_initialization": "expects torch's own words for a mesh of two dimensions",
    "test_ddp_control_flow_different_across_ranks": "reads the C++ reducer's map of used parameters",
    "test_ddp_control_flow_same_across_ranks": "reads the C++ reducer's map of used parameters",
    "test_ddp_multiple_nested_unused_params_err_ignore_params": "expects unused parameters to be an error",
    "test_ddp_multiple_nested_unused_params_error": "expects unused parameters to be an error",
    "test_ddp_native_mixed_precision_ignored_params": "reads the copies kept by torch's private mixed_precision",
    "test_ddp_profiling_torch_profiler": "counts the reducer's profiler events, one all_reduce a step among them",
    "test_ddp_unused_params_rebuild_buckets_exception": "expects unused parameters to be an error",
    "test_detect_ddp_is_actually_static": "asks the C++ reducer whether the graph has been static",
    "test_different_graph_across_ranks": "asks the C++ logger whether buckets were rebuilt",
    "test_invalid_static_graph": "expects a changed graph to be an error",
    "test_skip_all_reduce_unused_parameters": "asks the C++ logger how many buckets were reduced",
}

# Sizes, in tests meant for GPUs, that a CPU does not finish in time, and the sizes to try on one.
SMALLER = {"test_ddp_uneven_inputs": {1000: 40}}

SUITES = ("distributed_test", "ddp_under_dist_autograd_test", "rpc.rpc_test")
DDP_NAMES = ("DistributedDataParallel", "DDP")


@dataclass(frozen=True)
class Outcome:
    verdict: str  # pass, fail, skip
    reason: str = ""
    seconds: float = 0.0
    log: str = ""


# --- the suites


def import_suites() -> list[types.ModuleType]:
    """Import torch's test modules; BACKEND and WORLD_SIZE must be set, as their decorators read them on import."""
    # torch's test base class comes from expecttest, of which the DDP tests use nothing beyond unittest.
    try:
        import expecttest  # noqa: F401
    except ImportError:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    return [importlib.import_module(f"torch.testing._internal.distributed.{name}") for name in SUITES]


def test_classes(modules: list[types.ModuleType]) -> Iterator[type[unittest.TestCase]]:
    """Make each suite runnable, which torch leaves to the files of its repository that are not in the wheel."""
    import torch
    from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import RpcAgentTestFixture
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture
    from torch.testing._internal.distributed.rpc_utils import SpawnHelper

    class ForkedRanks:
        """Ranks are forked, not spawned: they inherit the imported modules and the class put in DDP's place."""

        def _spawn_processes(self) -> None:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    distributed_test = modules[0]

    class DistributedTest(
        ForkedRanks, distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
    ):
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

    yield DistributedTest
    for module in modules:
        for name, member in vars(module).items():
            if not inspect.isclass(member) or member.__module__ != module.__name__:
                continue
            if issubclass(member, RpcAgentTestFixture):
                yield type(name, (ForkedRanks, member, TensorPipeRpcAgentTestFixture, SpawnHelper), {})
            elif issubclass(member, unittest.TestCase) and member is not distributed_test.TestDistBackend:
                yield member


@functools.cache
def names_used(module_name: str) -> dict[str, set[tuple[str, str]]]:
    """What each definition in a module names: pairs of a name and what it hangs on ("" if on nothing).

    Decorators are left out: most of them name DDP only to say that some backend lacks it.
    """
    used: dict[str, set[tuple[str, str]]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.ClassDef):
                continue
            found = used.setdefault(prefix + child.name, set())
            for inner in (inner for statement in child.body for inner in ast.walk(statement)):
                if isinstance(inner, ast.Attribute):
                    found.add((inner.attr, ast.unparse(inner.value)))
                elif isinstance(inner, ast.Name):
                    found.add((inner.id, ""))
            visit(child, f"{prefix}{child.name}." + "<locals>." * isinstance(child, ast.FunctionDef))

    visit(ast.parse(Path(sys.modules[module_name].__file__).read_text()), "")
    return used


def constructs_ddp(definition: Callable[..., object], owner: type, seen: set[object]) -> bool:
    """Whether a test, or any method of its class or anything of torch.testing that it uses, names DDP."""
    definition = inspect.unwrap(definition)
    if definition in seen:
        return False
    seen.add(definition)
    module = sys.modules[definition.__module__]
    for name, hangs_on in names_used(definition.__module__).get(definition.__qualname__, ()):
        if name in DDP_NAMES:
            return True
        if hangs_on:
            place = owner if hangs_on in ("self", "cls") else getattr(module, hangs_on, None)
            reached = getattr(place, name, None) if inspect.isclass(place) else None
        else:
            reached = getattr(module, name, None)
        # A test class is followed by the methods named, not as a whole.
        test_class = inspect.isclass(reached) and any(member.startswith("test_") for member in dir(reached))
        if test_class or not (inspect.isfunction(reached) or inspect.isclass(reached)):
            continue
        if reached.__module__.startswith("torch.testing") and constructs_ddp(reached, owner, seen):
            return True
    return False


def select_tests(classes: Iterator[type[unittest.TestCase]], keyword: str) -> Iterator[tuple[type, str]]:
    for owner in classes:
        for name in unittest.defaultTestLoader.getTestCaseNames(owner):
            if keyword in f"{owner.__name__}.{name}" and constructs_ddp(getattr(owner, name), owner, set()):
                yield owner, name


# --- one test


def put_in_ddps_place(replacement: type, mark: Path) -> None:
    """Rebind every name by which torch's test modules reach DDP; leave `mark` behind once one is constructed."""
    from torch.nn.parallel import DistributedDataParallel as Stock

    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("torch.nn.parallel", "torch.testing")):
            for name in DDP_NAMES:
                if vars(module).get(name) is Stock:
                    setattr(module, name, replacement)
    construct = replacement.__init__

    @functools.wraps(construct)
    def marked(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        mark.touch()
        construct(self, *args, **kwargs)

    replacement.__init__ = marked


def pretend_gpus(ddp_class: type) -> None:
    """Let tests that ask for GPUs run on CPU: devices are announced, and all of them are the CPU."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.testing._internal import common_distributed

    def on_cpu(value: object) -> object:
        if isinstance(value, torch.device | str) and str(value).startswith("cuda"):
            return torch.device("cpu")
        return value

    def on_cpu_from_index(value: object) -> object:
        return torch.device("cpu") if type(value) is int else on_cpu(value)

    class CudaIsCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function is torch.Tensor.cuda:
                return args[0]
            # A bare integer is a device only where a device is meant.
            first = on_cpu_from_index if function is torch.Tensor.to else on_cpu
            args = [*args[:1], *map(first, args[1:2]), *map(on_cpu, args[2:])]
            kwargs = {k: (on_cpu_from_index if k == "device" else on_cpu)(v) for k, v in (kwargs or {}).items()}
            return function(*args, **kwargs)

    move = torch.nn.Module.to
    torch.nn.Module.to = lambda self, *args, **kwargs: move(
        self, *map(on_cpu_from_index, args), **{k: on_cpu_from_index(v) for k, v in kwargs.items()}
    )
    torch.nn.Module.cuda = lambda self, device=None: self
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: max(4, int(os.environ["WORLD_SIZE"]))
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda device: nullcontext()
    for name in ("set_device", "synchronize", "manual_seed_all"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.accelerator.current_stream = lambda: types.SimpleNamespace(wait_stream=lambda other: None)
    common_distributed.TEST_CUDA = True
    construct = ddp_class.__init__

    def without_devices(self, module, device_ids=None, output_device=None, **options):  # type: ignore[no-untyped-def]
        construct(self, module, **options)

    ddp_class.__init__ = functools.wraps(construct)(without_devices)
    # Ranks are forked from this thread and inherit the mode with it.
    CudaIsCpu().__enter__()


def shrink(test: types.FunctionType) -> None:
    """Put the sizes in SMALLER in the place of the test's own."""
    sizes = SMALLER.get(test.__name__, {})
    constants = tuple(sizes.get(c, c) if type(c) is int else c for c in test.__code__.co_consts)
    test.__code__ = test.__code__.replace(co_consts=constants)


def run_test(owner: type[unittest.TestCase], name: str, ddp_class: type, limit_s: float, pretend: bool) -> Outcome:
    """Run one test in a process group of its own, which is gone with all its ranks when this returns."""
    with tempfile.TemporaryDirectory(prefix="torch_ddp_tests_") as directory:
        return _run_in(Path(directory), owner, name, ddp_class, limit_s, pretend)


def _run_in(
    directory: Path, owner: type[unittest.TestCase], name: str, ddp_class: type, limit_s: float, pretend: bool
) -> Outcome:
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _run_in_child(directory, owner, name, ddp_class, pretend)
    try:
        ended = _wait(pid, started + limit_s)
        if not ended:
            os.killpg(pid, signal.SIGUSR1)  # Each rank writes down where it stands.
            time.sleep(0.5)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _reap()
    seconds = time.monotonic() - started
    log = (directory / "log").read_text(errors="replace") if (directory / "log").exists() else ""
    if not ended:
        return Outcome("fail", f"not finished after {limit_s:g} s", seconds, log)
    if not (directory / "outcome").exists():
        return Outcome("fail", "the test process died", seconds, log)
    verdict, reason = json.loads((directory / "outcome").read_text())
    reason = _first_cause(verdict, reason, log)
    if verdict == "pass" and not (directory / "constructed").exists():
        reason = "constructs no DDP"
    return Outcome(verdict, reason, seconds, log)


def _run_in_child(directory: Path, owner: type[unittest.TestCase], name: str, ddp_class: type, pretend: bool) -> None:
    try:
        os.setsid()
        output = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR1)
        os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
        put_in_ddps_place(ddp_class, directory / "constructed")
        if pretend:
            shrink(inspect.unwrap(getattr(owner, name)))
            pretend_gpus(ddp_class)
        result = unittest.TestResult()
        owner(name).run(result)
        if problems := result.failures + result.errors:
            verdict, reason = "fail", problems[0][1]
        elif result.skipped:
            verdict, reason = "skip", result.skipped[0][1]
        else:
            verdict, reason = "pass", ""
        (directory / "outcome").write_text(json.dumps([verdict, reason]))
    except BaseException:
        traceback.print_exc()
    finally:
        # Whatever happens, the child must not go on with the parent's work.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _wait(pid: int, until: float) -> bool:
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.05)
    return False


def _reap() -> None:
    """Collect whatever the test left; as sub-reaper this process is the parent of ranks that lost theirs."""
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _first_cause(verdict: str, reason: str, log: str) -> str:
    """One line that says why: a rank's own words where torch reports no more than its exit code."""
    if verdict == "skip" and (said := re.search(r"for following reason: (.+)", log)):
        return said[1]
    if verdict == "fail":
        errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception|Failure)\b.*", reason, re.MULTILINE)
        inner = [error for error in errors if not error.startswith("RuntimeError: Process ")]
        return (inner or errors or [reason.strip().splitlines()[-1]])[0][:200]
    return reason


# --- the report


def judge(outcome: Outcome, name: str, pretend: bool, run_stock: Callable[[], Outcome] | None) -> tuple[str, str]:
    """What the outcome of one test means for the class under test, and why; `run_stock` is None if that is torch's."""
    failed = outcome.verdict == "fail"
    if outcome.verdict == "skip":
        return "skip", outcome.reason
    if run_stock is None:
        return ("n/a", f"needs a GPU: {outcome.reason}") if failed and pretend else (outcome.verdict, outcome.reason)
    if name in NOT_APPLICABLE:
        return ("n/a" if failed else "UNLISTED"), NOT_APPLICABLE[name]
    if failed and (stock := run_stock()).verdict == "fail":
        return "n/a", f"fails with torch's class too: {stock.reason}"
    return outcome.verdict, outcome.reason


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true", help="run torch's own class")
    parser.add_argument("-k", metavar="NAME", default="", help="only tests whose Class.name contains NAME")
    parser.add_argument("-v", action="store_true", help="show what the ranks of a failed test wrote")
    parser.add_argument("--list", action="store_true", help="name the tests that would run, and stop")
    parser.add_argument("--pretend-gpus", action="store_true", help="run the tests that ask for GPUs on CPU")
    parser.add_argument("--world", type=int, default=2, help="ranks, where the suite does not say (default 2)")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="seconds a test may take (default 120)")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(args.world), MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    modules = import_suites()
    stock_class = importlib.import_module("torch.nn.parallel").DistributedDataParallel
    ddp_class = stock_class if args.stock else importlib.import_module("gradientflow").DistributedDataParallel
    tests = list(select_tests(test_classes(modules), args.k))
    if args.list:
        print(*(f"{owner.__name__}.{name}" for owner, name in tests), sep="\n")
        return 0

    tally: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    started = time.monotonic()
    for owner, name in tests:
        run = functools.partial(run_test, owner, name, limit_s=args.limit, pretend=args.pretend_gpus)
        outcome = run(ddp_class)
        label, reason = judge(
            outcome, name, args.pretend_gpus, None if args.stock else functools.partial(run, stock_class)
        )
        tally[label] += 1
        if label == "skip":
            skips[reason] += 1
        print(f"{label:8} {owner.__name__}.{name}  {outcome.seconds:.1f} s  {reason}".rstrip(), flush=True)
        if outcome.verdict == "fail" and args.v:
            print(textwrap.indent(outcome.log, "    | "), flush=True)

    print(
        f"\n{len(tests)} tests in {time.monotonic() - started:.0f} s:", ", ".join(f"{n} {v}" for v, n in tally.items())
    )
    for reason, count in skips.most_common():
        print(f"  {count:3} skipped by torch: {reason}")
    if tally["UNLISTED"]:
        print(f"  {tally['UNLISTED']} in NOT_APPLICABLE pass: take them off the list")
    unknown = [] if args.k else sorted(set(NOT_APPLICABLE) - {name for _, name in tests})
    for name in unknown:
        print(f"  NOT_APPLICABLE names {name}, which this torch does not have")
    return int(bool(tally["fail"] or tally["UNLISTED"] or unknown))


if __name__ == "__main__":
    sys.exit(main())
