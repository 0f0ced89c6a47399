"""MaxSim: the reference and the kernel (interpreted, or compiled on CUDA) equal a loop in fp64."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch

from penstock.errors import BadValue
from penstock.kernels import maxsim as module
from penstock.kernels.limits import SHARED_BYTES, limits_for
from penstock.kernels.maxsim import (
    Tiling,
    choose_tiling,
    maxsim,
    maxsim_packed,
    maxsim_reference,
    maxsim_triton,
)
from tests.kernels.ragged import by_loop, make_inputs, relative_error

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("dim", [1, 96, 100, 1100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_equals_a_loop_over_tokens(dtype: torch.dtype, dim: int, scales: bool) -> None:
    inputs = make_inputs(dtype, dim, scales=scales)
    assert relative_error(maxsim(**inputs), by_loop(inputs)) < 1e-6


def test_tiles_of_the_reference_do_not_change_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(
        torch.float32, 16, document_lengths=[3, 80, 1, 1, 0, 40] * 4, query_lengths=[7], pairs=None
    )
    whole = maxsim(**inputs)
    monkeypatch.setattr(module, "TILE_TOKENS", 50)
    torch.testing.assert_close(maxsim(**inputs), whole, rtol=1e-6, atol=1e-6)


def test_one_query_is_paired_with_all_documents_and_several_by_index() -> None:
    alone = make_inputs(torch.float32, 16, query_lengths=[4], pairs=None)
    assert relative_error(maxsim(**alone), by_loop(alone)) < 1e-6
    equal = make_inputs(torch.float32, 16, query_lengths=[4, 0, 2, 9, 1, 3], pairs=None)
    assert relative_error(maxsim(**equal), by_loop(equal)) < 1e-6


def test_packed_documents_need_only_cumulative_lengths() -> None:
    query, documents = torch.randn(4, 8), torch.randn(12, 8)
    cu_lengths = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    wanted = [
        (query @ documents[:5].T).amax(1).sum(),
        torch.tensor(0.0),
        (query @ documents[5:].T).amax(1).sum(),
    ]
    torch.testing.assert_close(maxsim_packed(query, documents, cu_lengths), torch.stack(wanted))


def test_empty_queries_and_documents_score_zero() -> None:
    inputs = make_inputs(
        torch.float32, 8, query_lengths=[0, 3], document_lengths=[4, 0], pairs=[(0, 0), (1, 1)]
    )
    assert maxsim(**inputs).tolist() == [0.0, 0.0]
    assert maxsim(
        **make_inputs(torch.float32, 8, document_lengths=[], query_lengths=[2], pairs=None)
    ).shape == (0,)


def test_scores_are_written_to_out() -> None:
    inputs = make_inputs(torch.float32, 8)
    out = torch.full((len(inputs["pair_queries"]),), 7.0)
    assert maxsim(**inputs, out=out) is out
    assert torch.equal(out, maxsim(**inputs))


def test_nan_shows_in_the_score_of_its_document() -> None:
    inputs = make_inputs(torch.float32, 8, query_lengths=[3], document_lengths=[5, 40, 2], pairs=None)
    inputs["documents"][inputs["document_starts"][1] + 7] = torch.nan
    assert maxsim(**inputs).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"documents": torch.zeros(4, 8, dtype=torch.float16)}, "the same dtype"),
        ({"documents": torch.zeros(4, 9)}, "the same dim"),
        ({"queries": torch.zeros(8)}, "the same dim"),
        ({"pair_queries": torch.zeros(3, dtype=torch.int32)}, "give pair_queries"),
        ({"query_lengths": torch.zeros(3, dtype=torch.int32)}, "each start needs a length"),
        ({"out": torch.zeros(9)}, "out must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(BadValue, match=words):
        maxsim(**(make_inputs(torch.float32, 8) | change))


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "dim", "scales", "tile", "group"),
    [  # the interpreter cannot multiply bfloat16; queries of 33 tokens take three tiles of 16
        (torch.float32, 32, False, 32, 1),
        (torch.float32, 100, True, 32, 4),
        (torch.float16, 100, False, 128, 4),
        (torch.float16, 300, False, 64, 1),
        (torch.int8, 100, True, 128, 1),
        (torch.int8, 96, False, 32, 8),
    ],
)
def test_the_interpreted_kernel_equals_a_loop_over_tokens(
    only_interpreted: None, dtype: torch.dtype, dim: int, scales: bool, tile: int, group: int
) -> None:
    one_query = {"query_lengths": (20,), "pairs": None} if group > 1 else {}
    inputs = make_inputs(dtype, dim, scales=scales, **one_query)
    got = maxsim_triton(**inputs, tiling=Tiling(16, 64, tile, 4, 2, group))
    assert relative_error(got, by_loop(inputs)) < 1e-6


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 96, 100, 128, 256, 320, 768, 1024])
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_tilings_fit_the_shared_memory_of_the_device(
    capability: tuple[int, int], dtype: torch.dtype, dim: int
) -> None:
    limits = limits_for(capability)
    for longest_query, pairs in itertools.product((1, 32, 128, 4096), (1, 100, 100_000)):
        tiling = choose_tiling(dtype, dim, longest_query, 64, pairs, True, limits)
        buffers = tiling.stages if limits.has_async_products else tiling.stages - 1
        document, query = tiling.document * tiling.dim * buffers, tiling.query * tiling.dim
        queries = query * (buffers if tiling.dim < dim else 1)
        room = limits.shared_bytes - 2048  # for reductions
        assert (document + queries) * dtype.itemsize <= room


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("dim", [16, 96, 100, 128, 256, 768, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compiled_kernel_equals_a_loop_over_tokens(dtype: torch.dtype, dim: int, scales: bool) -> None:
    for shape in ({}, {"query_lengths": (150,), "pairs": None}, {"document_lengths": [1, 1, 0, 3, 2, 1]}):
        inputs = make_inputs(dtype, dim, scales=scales, device="cuda", **shape)
        longest = int(inputs["query_lengths"].max())
        error = relative_error(maxsim(**inputs, max_query_length=longest), by_loop(inputs))
        assert error < (1e-5 if dtype in (torch.float32, torch.int8) else 1e-3)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("group", [1, 2, 16])
def test_pairs_of_one_program_do_not_mix(group: int) -> None:
    lengths = [300, 5, 0, 64, 1, 0, 129] * 9
    inputs = make_inputs(torch.float16, 128, [70], lengths, None, device="cuda")
    got = maxsim_triton(**inputs, tiling=Tiling(32, 64, 128, 4, 3, group))
    assert relative_error(got, by_loop(inputs)) < 1e-3


@pytest.mark.gpu
@needs_cuda
def test_other_numbers_and_alignments_of_pairs_compile_nothing() -> None:
    inputs = make_inputs(torch.float16, 64, device="cuda")
    maxsim(**inputs)
    (cache, *_), *_ = module._maxsim_kernel.device_caches.values()
    compiled = len(cache)
    for pairs in (1, 3, 8):
        chosen = {name: inputs[name][1 : 1 + pairs] for name in ("pair_queries", "pair_documents")}
        got = maxsim(**(inputs | chosen))
        assert relative_error(got, by_loop(inputs | chosen)) < 1e-3
    assert len(cache) == compiled


@pytest.mark.gpu
@needs_cuda
def test_the_compiled_kernel_never_synchronises_and_allocates_nothing() -> None:
    inputs = make_inputs(
        torch.bfloat16, 128, document_lengths=[300, 5, 1000] * 50, query_lengths=[32], pairs=None
    )
    inputs = {name: value.cuda() for name, value in inputs.items()}
    wanted = maxsim_reference(**inputs)
    out = torch.empty(150, device="cuda")
    maxsim(**inputs, out=out)  # compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        maxsim(**inputs, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() == before
    torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@needs_cuda
def test_nan_shows_in_the_score_of_the_compiled_kernel() -> None:
    inputs = make_inputs(torch.bfloat16, 128, [3], [5, 140, 2], None, device="cuda")
    inputs["documents"][inputs["document_starts"][1] + 70] = torch.nan
    assert maxsim(**inputs).isnan().tolist() == [False, True, False]
