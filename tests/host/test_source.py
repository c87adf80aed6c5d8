# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from omni_speech_accel.host import source as host
from omni_speech_accel.host.symbol import Symbol
from omni_speech_accel.items._prompt import S3_MAX_FRAMES
from omni_speech_accel.plugin import fit as fit_module
from omni_speech_accel.plugin.fit import unfit_items
from omni_speech_accel.plugin.settings import resolve
from omni_speech_accel.plugin.table import CODE2WAV, PATCHES, TOKENIZER_MODULE, Hook, Patch, patch_for

VERSION = host.host_info().version


def test_every_symbol_of_a_fitting_item_is_a_verified_one_here() -> None:
    unverified = {
        symbol.qualname
        for patch in PATCHES
        if fit_module.fit(patch).applies
        for symbol in patch.symbols
        if not fit_module.is_verified(symbol)
    }
    assert unverified == set(), "run tools/generate.py --fingerprints once the suite has passed on this host"


def test_the_items_that_fit_this_host() -> None:
    fits = {patch.key for patch in PATCHES if fit_module.fit(patch).applies}
    prompt = {"sync_free_prompt", "speaker_device", "speaker_graph", "speaker_stream", "s3_graph"}
    assert prompt <= fits
    assert ("stop_index_cache" in fits) == (VERSION != "0.30.0")


def test_a_host_without_the_function_says_which_one_is_missing() -> None:
    patch = Patch("x", "", "", "", "", needs=(Symbol(TOKENIZER_MODULE, "S3TokenizerV2.gone"),))
    assert fit_module.fit(patch) == fit_module.Fit(False, "the host has no s3tokenizer.model_v2:S3TokenizerV2.gone")


def test_a_host_without_the_module_says_so() -> None:
    patch = Patch("x", "", "", "", "", needs=(Symbol("vllm_omni.not_there.module", "f"),))
    assert fit_module.fit(patch).reason == "the host has no module vllm_omni.not_there.module"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [(("self", "mel"), "new required parameter mel_len"), (("self", "mel", "mel_len", "x"), "no parameter x")],
)
def test_a_changed_signature_does_not_fit(parameters: tuple[str, ...], words: str) -> None:
    patch = Patch("x", "", "", "", "", needs=(Symbol(TOKENIZER_MODULE, "S3TokenizerV2.quantize", parameters),))
    assert words in fit_module.fit(patch).reason


def test_a_host_that_does_the_job_itself_is_left_alone() -> None:
    patch = Patch("x", "", "", "", "", native=(Symbol(TOKENIZER_MODULE, "S3TokenizerV2.quantize"),))
    assert fit_module.fit(patch) == fit_module.Fit(False, "the host does this itself (S3TokenizerV2.quantize)")


def test_a_changed_body_stops_an_item_unless_the_block_allows_it_and_always_one_that_restates_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "verified_fingerprints", dict)
    symbol = Symbol(TOKENIZER_MODULE, "S3TokenizerV2.quantize")
    calls = Patch("x", "", "", "", "", needs=(symbol,))
    judged = fit_module.fit(calls)
    assert (judged.applies, judged.verified) == (False, False)
    assert "S3TokenizerV2.quantize differs from every verified host" in judged.reason
    assert "allow_unverified_host: true" in judged.reason
    assert fit_module.fit(calls, allow_unverified=True) == fit_module.Fit(True, verified=False)
    restates = Patch("x", "", "", "", "", hooks=(Hook(replace(symbol, restated=True), "w"),))
    for allowed in (False, True):
        judged = fit_module.fit(restates, allow_unverified=allowed)
        assert not judged.applies
        assert "this item restates it" in judged.reason


def test_a_stage_of_an_unverified_host_has_the_items_that_its_block_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "verified_fingerprints", dict)
    for block in ({}, {"allow_unverified_host": "false"}, True):
        reasons = unfit_items(resolve(("block", block)), CODE2WAV, "cuda")
        assert "differs from every verified host" in reasons["speaker_stream"]
    allowed = unfit_items(resolve(("block", {"allow_unverified_host": True})), CODE2WAV, "cuda")
    assert "speaker_stream" not in allowed
    assert "restates" in allowed["s3_graph"]


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the library file that the prompt items restate, which the probe reads instead of the installed one."""
    root = host._package_root(TOKENIZER_MODULE.partition(".")[0])
    assert root is not None
    found = host._package_root
    monkeypatch.setattr(host, "_package_root", lambda name: tmp_path if name == root.name else found(name))
    monkeypatch.setattr(host, "source_of", host.source_of.__wrapped__)
    path = tmp_path / "model_v2.py"
    shutil.copy(root / path.name, path)
    return path


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (b"def f(:\n", "invalid syntax (model_v2.py, line 1)"),
        (b"\n\nx = '\xff'\n", "can't decode byte 0xff"),
        (b"x = '\xff'\n", "invalid or missing encoding declaration"),
        (b"x = 1\0\n", "null bytes"),
    ],
)
def test_a_file_that_is_no_python_leaves_its_items_off_and_says_why(
    tokenizer: Path, broken: bytes, reason: str
) -> None:
    tokenizer.write_bytes(broken)
    judged = fit_module.fit(patch_for("s3_graph"))
    assert not judged.applies
    assert judged.reason.startswith(f"{tokenizer} cannot be read: ")
    assert reason in judged.reason
    unfit = unfit_items(resolve(("here", True)), CODE2WAV, "cuda")
    assert unfit["sync_free_prompt"] == unfit["s3_graph"] == judged.reason
    assert "speaker_graph" not in unfit
    native = Patch("x", "", "", "", "", native=(Symbol(TOKENIZER_MODULE, "S3TokenizerV2.gone"),))
    assert fit_module.fit(native).reason == judged.reason


def test_a_file_in_an_encoding_that_it_declares_is_read_as_python_does(tokenizer: Path) -> None:
    text = tokenizer.read_text(encoding="utf-8").encode("ascii", "replace").decode()
    tokenizer.write_bytes(f"# -*- coding: latin-1 -*-\n# caf\u00e9\n{text}".encode("latin-1"))
    assert fit_module.fit(patch_for("s3_graph")) == fit_module.Fit(True)


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("    def quantize(", "    async def quantize(", "async, not plain"),
        ("    def quantize(", "    @staticmethod\n    def quantize(", "staticmethod, not plain"),
        ("    def quantize(", "    @classmethod\n    def quantize(", "classmethod, not plain"),
        ("    def quantize(", "    @functools.cached_property\n    def quantize(", "cached_property, not plain"),
    ],
)
def test_a_function_of_another_kind_does_not_fit(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, kind: str
) -> None:
    text = tokenizer.read_text(encoding="utf-8")
    assert before in text
    assert fit_module.fit(patch_for("s3_graph")) == fit_module.Fit(True)
    tokenizer.write_text(text.replace(before, after), encoding="utf-8")
    expected = f"S3TokenizerV2.quantize is another kind of function on this host ({kind})"
    assert fit_module.fit(patch_for("s3_graph")) == fit_module.Fit(False, expected)
    unnamed = Patch("x", "", "", "", "", needs=(Symbol(TOKENIZER_MODULE, "S3TokenizerV2.quantize"),))
    assert fit_module.fit(unnamed).reason == expected


def test_a_class_method_that_is_none_any_more_does_not_fit(tokenizer: Path) -> None:
    symbol = Symbol(TOKENIZER_MODULE, "C.make", ("cls", "a"))
    patch = Patch("x", "", "", "", "", needs=(symbol,))
    tokenizer.write_text("class C:\n    @classmethod\n    def make(cls, a): ...\n")
    assert fit_module.fit(patch, allow_unverified=True).applies
    tokenizer.write_text("class C:\n    def make(cls, a): ...\n")
    assert fit_module.fit(patch).reason == "C.make is another kind of function on this host (plain, not classmethod)"


def test_a_host_does_the_job_itself_whatever_its_function_looks_like(tokenizer: Path) -> None:
    patch = patch_for("s3_graph")
    (native,) = patch.native
    other = replace(patch, native=(replace(native, module=TOKENIZER_MODULE, qualname="S3TokenizerV2.quantize"),))
    assert fit_module.fit(other) == fit_module.Fit(False, "the host does this itself (S3TokenizerV2.quantize)")


def test_an_unknown_version_is_judged_by_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    info = host.host_info()
    monkeypatch.setattr(host, "host_info", lambda: replace(info, version="9.99.dev0+unknown"))
    assert fit_module.fit(patch_for("sync_free_prompt")) == fit_module.Fit(True)


def test_of_two_definitions_of_a_name_the_last_is_the_one_that_python_has() -> None:
    tree = ast.parse(
        "class A:\n def f(self): pass\n def f(self, more): pass\nclass B: pass\nclass B:\n def g(self): pass"
    )
    found = host.definition_of(tree, "A.f")
    assert isinstance(found, ast.FunctionDef)
    assert [argument.arg for argument in found.args.args] == ["self", "more"]
    assert host.definition_of(tree, "B.g") is not None


def test_an_optional_hook_may_be_missing() -> None:
    hook = Hook(Symbol(TOKENIZER_MODULE, "S3TokenizerV2.gone"), "w", optional=True)
    assert fit_module.fit(Patch("x", "", "", "", "", hooks=(hook,))).applies


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("def f(a):\n    return a\n", "def f(a):\n    # why\n\n    return a\n", True),
        ("def f(a):\n    return a\n", 'def f(a):\n    """Doc."""\n    return a\n', True),
        ("class A:\n    def f(a):\n        return a\n", "class A:\n    x = 1\n    def f(a):\n        return a\n", True),
        ("def f(a):\n    return a\n", "def f(a):\n    return -a\n", False),
        ("def f(a):\n    return a\n", "def f(a, b=1):\n    return a\n", False),
        ("def f(a):\n    return a\n", "@decorated\ndef f(a):\n    return a\n", True),
    ],
)
def test_a_fingerprint_follows_the_code_and_not_the_prose(
    before: str, after: str, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(text: str) -> str | None:
        monkeypatch.setattr(host, "source_of", lambda module: (text, ast.parse(text)))
        return host.fingerprint("m", "A.f" if "class" in text else "f")

    assert (of(before) == of(after)) is same


def test_the_window_of_the_short_path_is_the_librarys() -> None:
    source = host.source_of(TOKENIZER_MODULE)
    assert source is not None
    found = [
        node.value.value
        for cls in ast.walk(source[1])
        if isinstance(cls, ast.ClassDef) and cls.name == "S3TokenizerV2"
        for function in cls.body
        if isinstance(function, ast.FunctionDef) and function.name == "quantize"
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "max_frames"
        and isinstance(node.value, ast.Constant)
    ]
    assert found == [S3_MAX_FRAMES]


def test_sources_are_found_where_python_would_import_them_from() -> None:
    module = "vllm_omni.model_executor.models.step_audio2.step_audio2_token2wav"
    package = importlib.util.find_spec("vllm_omni")
    assert package is not None
    assert package.submodule_search_locations is not None
    expected = Path(next(iter(package.submodule_search_locations))).joinpath(*module.split(".")[1:]).with_suffix(".py")
    source = host.source_of(module)
    assert source is not None
    assert source[0] == expected.read_text(encoding="utf-8")
