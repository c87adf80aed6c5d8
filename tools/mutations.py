# SPDX-License-Identifier: Apache-2.0
"""Take each fix of the accelerator runtime out, and see the simulated accelerator's suite fail.

    python tools/mutations.py [--only PATTERN]

Each mutation is a replacement of source text that must occur exactly once, in a temporary copy of the package; the
suite then runs against the copy in a process of its own. A mutation that the suite does not notice has SURVIVED: the
rule it breaks is not proven. Where the host is installed, the items' tests on that device must notice, by themselves,
the mutations that a race or a replaced model of an item depends on. Exit status 1 when any survives or no longer
applies, or when the suite fails unmutated.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import io
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    "omni_speech_accel/__init__.py",
    "omni_speech_accel/environment.py",
    "omni_speech_accel/runtime",
    "tests/__init__.py",
    "tests/runtime",
    "tests/simulator",
)
SUITES = {
    "test_graph_cache_simulated.py": "graph_cache.py",
    "test_streams_simulated.py": "streams.py",
    "test_staging_simulated.py": "staging.py",
    "test_device_module.py": "device_module.py",
}
ITEM_SUITES = ("test_speaker_graph.py", "test_s3_graph.py", "test_speaker_stream.py")
TIMEOUT = 120  # seconds for one run of the suite, which takes 6 on an idle core
ITEM_TIMEOUT = 600  # the host's import and checkpoint, 30 seconds, come first
# First failure, no report, and nothing that is not the suite's own: what a run costs is then the suite itself.
PYTEST_OPTIONS = ("-x", "-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", "-c", os.devnull)

CACHE = "graph_cache.py"
STREAMS = "streams.py"
STAGING = "staging.py"
SEAM = "accelerator.py"
MODULE = "device_module.py"


@dataclass(frozen=True)
class Mutation:
    """`old`, which occurs once in `runtime/<module>`, becomes `new`: the guarantee no longer holds."""

    guarantee: str
    title: str
    module: str
    old: str
    new: str
    also: tuple[str, str] | None = None  # a second replacement, where the mutation needs one
    items: bool = False  # the items' tests must notice it too


WAIT_AND_WRITE = """\
            accelerator.wait_event(stream, last_use)
            try:
                for static, value in zip(entry.inputs, inputs, strict=True):
                    static.copy_(value)
                    # Were the cache dropped now, its buffers would be handed out while this stream reads them.
                    accelerator.record_stream(static, stream)
"""
STARTED = "            started = time.perf_counter()\n            try:\n"
FINALLY = "            finally:\n                # Also after an error: the buffers have been touched by then.\n"
REPLAY = "                entry.graph.replay()\n"
CLONE = "                return pytree.tree_map_only(torch.Tensor, torch.clone, entry.graph.outputs)\n"
RECORD_LAST_USE = "                accelerator.record_event(last_use, stream)\n"
WAIT_LAST_USE = "            accelerator.wait_event(stream, last_use)\n"
PUBLISH = "                self._entries[signature] = entry\n"
RECORD = "                entry = self._record(fn, inputs, alive)\n"
ALIVE = "            alive = None if owner is None else self._watched(owner)\n"
PREPARE = "            self._accelerator.prepare_capture(self._device)\n"

MUTATIONS = (
    Mutation("1 replay before clone", "the capture is not replayed", CACHE, REPLAY, ""),
    Mutation(
        "1 replay before clone", "outputs are not cloned", CACHE, CLONE, "                return entry.graph.outputs\n"
    ),
    Mutation(
        "1 replay before clone",
        "outputs are cloned before the replay",
        CACHE,
        REPLAY + CLONE,
        "                out = pytree.tree_map_only(torch.Tensor, torch.clone, entry.graph.outputs)\n"
        + REPLAY
        + "                return out\n",
    ),
    Mutation(
        "2 publish last",
        "published before the first replay",
        CACHE,
        RECORD,
        RECORD + "                self._entries[signature] = entry\n",
    ),
    Mutation("3 failed shapes", "a failed shape is forgotten", CACHE, "            self._failed.add(signature)\n", ""),
    Mutation(
        "3 failed shapes",
        "a failed shape takes a slot",
        CACHE,
        "len(self._entries) >= self._max_graphs",
        "len(self._entries) + len(self._failed) >= self._max_graphs",
    ),
    Mutation(
        "3 failed shapes",
        "the failure is not logged",
        CACHE,
        "            self._reasons.add(reason)\n            key, _, *shapes = signature\n            logger.warning(\n",
        "            self._reasons.add(reason)\n            key, _, *shapes = signature\n            logger.debug(\n",
    ),
    Mutation("3 failed shapes", "a cause is told for each shape", CACHE, "if reason not in self._reasons:", "if True:"),
    Mutation(
        "3 failed shapes",
        "failing captures are tried for ever",
        CACHE,
        "self._failures_in_a_row >= FAILURES_IN_A_ROW",
        "False",
    ),
    Mutation(
        "3 failed shapes",
        "failures are counted over successes",
        CACHE,
        "                self._failures_in_a_row = 0\n",
        "",
    ),
    Mutation(
        "3 failed shapes",
        "a failure is never forgotten",
        CACHE,
        "            self._failed = {signature for signature in self._failed if signature[1][0] != identity}\n",
        "",
    ),
    Mutation(
        "3 failed shapes",
        "a failed capture fails the request",
        CACHE,
        "            except Exception as error:\n",
        "            except ZeroDivisionError as error:\n",
    ),
    Mutation(
        "4 own inputs",
        "the graph aliases the caller's tensor",
        CACHE,
        "value.detach().clone(memory_format=torch.contiguous_format)",
        "value.detach()",
    ),
    Mutation("5 last-use event", "no wait before the shared inputs are written", CACHE, WAIT_LAST_USE, "", items=True),
    Mutation(
        "5 last-use event",
        "the wait comes after the write",
        CACHE,
        WAIT_AND_WRITE,
        WAIT_AND_WRITE.replace(WAIT_LAST_USE, "") + "    " + WAIT_LAST_USE,
    ),
    Mutation(
        "5 last-use event", "the event is never recorded", CACHE, RECORD_LAST_USE, "                pass\n", items=True
    ),
    Mutation(
        "5 last-use event",
        "the event is recorded before the clone",
        CACHE,
        CLONE + FINALLY + RECORD_LAST_USE,
        RECORD_LAST_USE + CLONE + "            finally:\n                pass\n",
    ),
    Mutation(
        "5 last-use event",
        "an error leaves the event unrecorded",
        CACHE,
        CLONE + FINALLY + RECORD_LAST_USE,
        CLONE.replace("return", "cloned =") + RECORD_LAST_USE + "                return cloned\n"
        "            finally:\n                pass\n",
    ),
    Mutation(
        "5 last-use event",
        "each graph has an event of its own",
        CACHE,
        "        accelerator, last_use = self._accelerator, self._last_use\n",
        "        accelerator = self._accelerator\n"
        "        last_use = _EVENTS.setdefault(id(entry), accelerator.create_event(self._device))\n",
        also=("FIRST_WARMUPS = 2\n", "FIRST_WARMUPS = 2\n_EVENTS: dict[int, Any] = {}\n"),
    ),
    Mutation(
        "5 last-use event",
        "warm-ups run on the capture stream",
        SEAM,
        "        for _ in range(warmups):\n            fn()\n",
        "",
        also=(
            "            with self.use_stream(side):\n",
            "            with self.use_stream(side):\n"
            "                for _ in range(warmups):\n                    fn()\n",
        ),
    ),
    Mutation(
        "5 last-use event",
        "no host lock around the submission",
        CACHE,
        "        with self._submitting, torch.no_grad():\n",
        "        with torch.no_grad():\n",
    ),
    Mutation(
        "6 eager shares nothing",
        "the eager path takes the capture lock",
        CACHE,
        "        outputs = fn(*inputs)\n",
        "        with self._capturing:\n            outputs = fn(*inputs)\n",
    ),
    Mutation(
        "6 eager shares nothing",
        "a new shape waits while another is captured",
        CACHE,
        "self._capturing.acquire(blocking=False)",
        "self._capturing.acquire()",
    ),
    Mutation(
        "6 eager shares nothing",
        "the eager path waits for the last use",
        CACHE,
        "        outputs = fn(*inputs)\n",
        "        stream = self._accelerator.current_stream(self._device)\n"
        "        for entry in self._entries.values():\n"
        "            self._accelerator.wait_event(stream, self._last_use)\n"
        "        outputs = fn(*inputs)\n",
    ),
    Mutation(
        "6 eager shares nothing",
        "the eager path takes the submission lock",
        CACHE,
        "        outputs = fn(*inputs)\n",
        "        with self._submitting:\n            outputs = fn(*inputs)\n",
    ),
    Mutation(
        "7 made in __init__",
        "the submission lock is made at first use",
        CACHE,
        "        with self._submitting, torch.no_grad():\n",
        "        self._submitting = vars(self).get('_made') or vars(self).setdefault('_made', threading.Lock())\n"
        "        with self._submitting, torch.no_grad():\n",
    ),
    Mutation(
        "7 made in __init__",
        "the event is made at first use",
        CACHE,
        "        accelerator, last_use = self._accelerator, self._last_use\n",
        "        accelerator = self._accelerator\n"
        "        made = vars(self)\n"
        "        last_use = made.get('_made') or made.setdefault('_made', accelerator.create_event(self._device))\n",
    ),
    Mutation(
        "7 made in __init__",
        "the capture lock is made at first use",
        CACHE,
        "        if not self._capturing.acquire(blocking=False):\n",
        "        self._capturing = vars(self).get('_made') or vars(self).setdefault('_made', threading.Lock())\n"
        "        if not self._capturing.acquire(blocking=False):\n",
    ),
    Mutation(
        "7 made in __init__",
        "the capture stream is made at capture",
        CACHE,
        "stream=self._capture_stream",
        "stream=None",
    ),
    Mutation(
        "7 made in __init__",
        "every thread has a capture lock of its own",
        CACHE,
        '        if not self._capturing.acquire(blocking=False):\n            return "busy"\n',
        "        self._capturing = threading.Lock()\n        self._capturing.acquire()\n",
    ),
    Mutation("8 prepared runtime", "the runtime is not prepared", CACHE, PREPARE, ""),
    Mutation(
        "8 prepared runtime",
        "prepared inside the try",
        CACHE,
        PREPARE + ALIVE + STARTED + RECORD,
        ALIVE + STARTED + "    " + PREPARE + RECORD,
    ),
    Mutation(
        "8 prepared runtime", "prepared once only", CACHE, PREPARE, "            if not self._entries:\n    " + PREPARE
    ),
    Mutation(
        "9 nested capture",
        "a running capture is not noticed",
        CACHE,
        """return "outer_capture" if self._accelerator.is_capturing(self._device) else "\"""",
        'return ""',
    ),
    Mutation(
        "9 nested capture",
        "the private stream leaves a running capture",
        STREAMS,
        " or accelerator.is_capturing(device):\n",
        ":\n",
    ),
    Mutation(
        "10 lifetimes",
        "static inputs are not recorded on the replaying stream",
        CACHE,
        "                    accelerator.record_stream(static, stream)\n",
        "",
    ),
    Mutation(
        "10 lifetimes",
        "the graph does not keep the function alive",
        CACHE,
        "fn if owner is None else None, owner)",
        "None, owner)",
    ),
    Mutation(
        "10 lifetimes",
        "private outputs are not recorded on the caller's stream",
        STREAMS,
        "                accelerator.record_stream(leaf, caller)\n",
        "                pass\n",
    ),
    Mutation(
        "10 lifetimes",
        "private inputs are not recorded on the private stream",
        STREAMS,
        "                accelerator.record_stream(value, self._stream)\n",
        "                pass\n",
    ),
    Mutation(
        "10 lifetimes",
        "a pinned source is not owned",
        STAGING,
        "            self._in_flight.append((event, pinned))\n",
        "            pass\n",
    ),
    Mutation(
        "10 lifetimes",
        "a pinned source is let go before its copy is done",
        STAGING,
        "if not self._accelerator.event_done(copy[0])",
        "if False",
    ),
    Mutation(
        "10 lifetimes",
        "finished pinned sources are never let go",
        STAGING,
        "if not self._accelerator.event_done(copy[0])",
        "if True",
    ),
    Mutation(
        "10 lifetimes",
        "the copy's event is recorded before the copy",
        STAGING,
        "        uploaded.copy_(pinned, non_blocking=True)\n        event = accelerator.create_event(device)\n"
        "        accelerator.record_event(event, accelerator.current_stream(device))\n",
        "        event = accelerator.create_event(device)\n"
        "        accelerator.record_event(event, accelerator.current_stream(device))\n"
        "        uploaded.copy_(pinned, non_blocking=True)\n",
    ),
    Mutation("11 cap", "the cap is not kept", CACHE, "len(self._entries) >= self._max_graphs", "False"),
    Mutation(
        "11 cap",
        "the latest shapes displace the first",
        CACHE,
        "len(self._entries) >= self._max_graphs",
        "False",
        also=(
            PUBLISH,
            "                if len(self._entries) == self._max_graphs:\n"
            "                    self._entries.pop(next(iter(self._entries)))\n" + PUBLISH,
        ),
    ),
    Mutation("11 cap", "misses are not counted", CACHE, '        self._count("eager", started)\n', ""),
    Mutation("11 cap", "no reason is counted", CACHE, '        self.counters.inc(f"eager_{why_eager}")\n', ""),
    Mutation(
        "12 baked in", "a graph of another precision is replayed", CACHE, "self._accelerator.precision())", "None)"
    ),
    Mutation(
        "12 baked in",
        "a convolution's precision is no switch",
        SEAM,
        ", backends.cudnn.conv.fp32_precision)",
        ",)",
    ),
    Mutation(
        "12 baked in",
        "a graph serves whatever model is there",
        CACHE,
        "None if owner is None else id(owner)",
        "None",
        also=(" and entry.serves(owner):", ":"),
        items=True,
    ),
    Mutation("12 baked in", "two models share a graph's key", CACHE, "None if owner is None else id(owner)", "None"),
    Mutation("12 baked in", "a dead model's graph serves its address", CACHE, " and entry.serves(owner):", ":"),
    Mutation(
        "12 baked in",
        "the graphs of a dead model keep their slots",
        CACHE,
        "                del self._entries[signature]\n",
        "                pass\n",
    ),
    Mutation(
        "12 baked in",
        "a model dies under its replays",
        CACHE,
        "        accelerator.synchronize_event(last_use)\n\n\n",
        "        pass\n\n\n",
    ),
    Mutation(
        "13 refused at begin",
        "a refusal is not undone",
        MODULE,
        "                self._undo_begin(graph, device, pool)\n",
        "                pass\n",
    ),
    Mutation(
        "13 refused at begin",
        "a capture that the driver has begun is left running",
        MODULE,
        "        if self.is_capturing(device):  # refused after the driver had agreed\n",
        "        if False:\n",
    ),
    Mutation(
        "13 refused at begin",
        "the graph that the filters ask is freed",
        MODULE,
        "        # Python, must not find freed memory there.\n        self._refused.append(graph)\n",
        "        # Python, must not find freed memory there.\n",
    ),
    Mutation(
        "13 refused at begin",
        "the generator stays in its capture state",
        MODULE,
        "                generator.graphsafe_set_state(generator.clone_state())\n",
        "                pass\n",
    ),
    Mutation(
        "13 refused at begin",
        "the smallest capture's filter stays",
        MODULE,
        "                    graph.capture_end()\n            self._forget_pool(device, pool)\n",
        "                    graph.capture_end()\n",
    ),
    Mutation(
        "collector",
        "the first of two captures turns it on again",
        MODULE,
        "            if not self._recordings and self._was_on:\n",
        "            if self._was_on:\n",
    ),
    Mutation(
        "stream join",
        "the caller does not wait for the private stream",
        STREAMS,
        "        accelerator.wait_event(caller, done)\n",
        "",
    ),
    Mutation(
        "stream join",
        "the private stream does not wait for the caller's inputs",
        STREAMS,
        "            accelerator.wait_event(self._stream, ready)\n",
        "",
    ),
    Mutation(
        "stream join",
        "a host leaf is recorded on a stream",
        STREAMS,
        "isinstance(leaf, torch.Tensor) and leaf.device == device:",
        "isinstance(leaf, torch.Tensor):",
    ),
    Mutation(
        "stream join",
        "the private stream waits for the caller's backlog",
        STREAMS,
        "        if made_by_caller:\n",
        "        if True:\n",
    ),
    Mutation(
        "stream join",
        "the private stream does not see weights under way",
        STREAMS,
        "            accelerator.wait_event(self._stream, loaded)\n",
        "",
    ),
    Mutation(
        "asynchronous upload", "uploads come from pageable memory", STAGING, "accelerator.pin_memory(tensor)", "tensor"
    ),
    Mutation(
        "asynchronous upload",
        "memory that cannot be pinned fails the request",
        STAGING,
        "except (RuntimeError, MemoryError) as error:",
        "except ZeroDivisionError as error:",
    ),
    Mutation(
        "asynchronous upload",
        "each upload tries to pin anew",
        STAGING,
        "known, self._blocking = self._blocking, True",
        "known = self._blocking",
    ),
    Mutation("asynchronous upload", "uploads wait", STAGING, "non_blocking=True", "non_blocking=False"),
    Mutation(
        "asynchronous upload",
        "the blocking switch is ignored",
        STAGING,
        "            self._blocking\n            or not",
        "            not",
    ),
    Mutation("warm-ups", "no warm-up before the first recording", CACHE, "FIRST_WARMUPS = 2", "FIRST_WARMUPS = 0"),
    Mutation("warm-ups", "each later shape pays for two", CACHE, "\nWARMUPS = 1", "\nWARMUPS = 2"),
    Mutation(
        "inference mode",
        "static inputs are made in the caller's mode",
        CACHE,
        "torch.inference_mode(False), torch.no_grad()",
        "torch.no_grad()",
    ),
)


def mutate(package: Path, mutation: Mutation) -> bool:
    """Apply to the copy; False where the text to replace is not there exactly once."""
    source = package / "omni_speech_accel" / "runtime" / mutation.module
    text = source.read_text()
    for old, new in filter(None, ((mutation.old, mutation.new), mutation.also)):
        if text.count(old) != 1:
            return False
        text = text.replace(old, new)
    compile(text, str(source), "exec")  # a mutation that is no Python would be "killed" by its own import
    source.write_text(text)
    return True


def copy_package(target: Path, names: tuple[str, ...] = COPIED) -> None:
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def _run_suite(package: Path, paths: list[str], report: multiprocessing.queues.SimpleQueue[tuple[int, str]]) -> None:
    import pytest

    class FirstFailure:
        name = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and not self.name:
                self.name = report.nodeid.rpartition("::")[2]

    os.chdir(package)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path[:] = [str(package), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
    first = FirstFailure()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = pytest.main([*PYTEST_OPTIONS, "--rootdir", str(package), *paths], plugins=[first])
    report.put((int(status), first.name))


def run_suite(package: Path, paths: list[str], timeout: int) -> tuple[int, str]:
    """Exit status of the suite against a copy, and the first test that failed. 124: it hung."""
    # Forked from a parent that has imported torch but nothing of ours: a second per run instead of five.
    context = multiprocessing.get_context("fork")
    report = context.SimpleQueue()
    process = context.Process(target=_run_suite, args=(package, paths, report))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        return 124, "timeout"
    return (process.exitcode or 1, "crash") if report.empty() else report.get()


def judge(mutation: Mutation | None, items: bool = False) -> tuple[str, str]:
    """What became of a mutation (None: of the suite without one), and by which test; `items`: of the items' tests."""
    module = mutation.module if mutation else None
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        package = Path(folder)
        copy_package(package, ("omni_speech_accel", "tests") if items else COPIED)
        if mutation is not None and not mutate(package, mutation):
            return "NOT APPLIED", f"text not found once in runtime/{mutation.module}"
        if items:
            paths = [f"tests/items/{suite}" for suite in ITEM_SUITES]
        else:  # the tests of the mutated module first: they notice soonest
            paths = [f"tests/runtime/{suite}" for suite in sorted(SUITES, key=lambda suite: SUITES[suite] != module)]
        status, test = run_suite(package, paths, ITEM_TIMEOUT if items else TIMEOUT)
    if mutation is None:
        return ("passed" if status == 0 else "FAILED"), test
    if status == 0:
        return "SURVIVED", ""
    # 1: tests failed; 124: a deadlock, which the mutation caused. Others mean that the suite did not run.
    return ("killed" if status in (1, 124) else "NOT RUN"), test


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="run the mutations whose guarantee or title contains this")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.empty(1, device="meta").tanh()  # imports the shape functions, which takes seconds, once for all forks
    gc.freeze()  # the forks' collections then leave the pages of all that alone

    started = time.monotonic()
    chosen = [(m, False) for m in MUTATIONS if options.only in m.guarantee or options.only in m.title]
    if importlib.util.find_spec("vllm_omni") is not None:
        chosen += [(m, True) for m, _ in chosen if m.items]
    for items in sorted({items for _, items in chosen}):
        verdict, test = judge(None, items)
        print(f"{'items' if items else 'runtime'} suite without a mutation: {verdict} {test}", flush=True)
        if verdict != "passed":
            return 1
    bad = 0
    print(f"{'guarantee':<24} {'mutation':<58} {'result':<12} noticed by")
    for mutation, items in chosen:
        verdict, test = judge(mutation, items)
        bad += verdict != "killed"
        print(f"{mutation.guarantee:<24} {mutation.title:<58} {verdict:<12} {test}", flush=True)
    gc.unfreeze()
    print(f"{len(chosen) - bad} of {len(chosen)} killed, {time.monotonic() - started:.0f} s")
    return 1 if bad or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
