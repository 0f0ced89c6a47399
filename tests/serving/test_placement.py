"""Which GPUs and cores the engines of a model get."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from penstock.config import EngineConfig, ModelConfig
from penstock.errors import ConfigError
from penstock.serving.placement import Hardware, numa_nodes, place, split_cores


class FakeHardware(Hardware):
    def __init__(self, gpus: int = 0, nodes: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),)) -> None:
        self.has_gpu, self.num_gpus, self.nodes = gpus > 0, gpus, nodes  # type: ignore[misc]


def model(size: int | str = 1, device: str = "auto") -> ModelConfig:
    return ModelConfig(engine=EngineConfig(device=device), data_parallel_size=size)


def devices(size: int | str, gpus: int, used: dict[str, int] | None = None, ranks: int = 1) -> list[str]:
    config = ModelConfig(
        engine=EngineConfig(device="cuda", tensor_parallel_size=ranks), data_parallel_size=size
    )
    placed = place(config, FakeHardware(gpus), Counter(used or {}))
    return [",".join(each.devices) for each in placed]


def test_a_single_engine_gets_no_limits() -> None:
    for hardware in (FakeHardware(), FakeHardware(8)):
        (only,) = place(model(), hardware, Counter())
        assert only.devices == only.cpus == ()


def test_each_engine_has_a_gpu_and_auto_takes_all() -> None:
    assert devices(2, 4) == ["cuda:0", "cuda:1"]
    assert devices("auto", 4) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert devices("auto", 1) == ["cuda:0"]


def test_engines_may_share_each_gpu() -> None:
    def placed(gpus: int, size: int | str = 1, device: str = "cuda", per_gpu: int = 2) -> list[str]:
        config = ModelConfig(
            engine=EngineConfig(device=device), data_parallel_size=size, engines_per_gpu=per_gpu
        )
        return [",".join(each.devices) for each in place(config, FakeHardware(gpus), Counter())]

    assert placed(1) == ["", ""]
    assert placed(4, 2) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert placed(2, "auto", per_gpu=3) == ["cuda:0"] * 3 + ["cuda:1"] * 3
    assert placed(2, device="cuda:1") == ["", ""]
    with pytest.raises(ConfigError, match="does not run on a GPU; set data_parallel_size") as refused:
        placed(0, device="cpu")
    assert refused.value.param == "engines_per_gpu"
    for wrong in (0, 9):
        with pytest.raises(ValueError, match=f"engines_per_gpu is {wrong}; use a number from 1 to 8"):
            ModelConfig(engine=EngineConfig(), engines_per_gpu=wrong)
    with pytest.raises(ValueError, match="engines_per_gpu is 2, and tensor_parallel_size is 2"):
        ModelConfig(engine=EngineConfig(tensor_parallel_size=2), engines_per_gpu=2)


def test_tensor_parallel_engines_take_consecutive_gpus() -> None:
    assert devices(2, 4, ranks=2) == ["cuda:0,cuda:1", "cuda:2,cuda:3"]
    assert devices("auto", 8, ranks=4) == ["cuda:0,cuda:1,cuda:2,cuda:3", "cuda:4,cuda:5,cuda:6,cuda:7"]


def test_a_further_model_takes_the_least_used_gpus() -> None:
    assert devices(1, 4, {"cuda:0": 1}) == ["cuda:1"]
    assert devices(2, 4, {"cuda:0": 1, "cuda:1": 2, "cuda:2": 1}) == ["cuda:0", "cuda:3"]
    assert devices(1, 1, {"cuda:0": 1}) == ["cuda:0"]


@pytest.mark.parametrize(
    ("size", "ranks", "words", "hint", "param"),
    [
        (3, 1, "data_parallel_size 3 needs 3 GPUs", "up to 2", "data_parallel_size"),
        (2, 2, "data_parallel_size 2 with tensor_parallel_size 2 needs 4", "up to 1", "data_parallel_size"),
        ("auto", 4, "tensor_parallel_size 4 needs 4 GPUs", "use fewer", "tensor_parallel_size"),
    ],
)
def test_more_gpus_than_there_are_is_refused(
    size: int | str, ranks: int, words: str, hint: str, param: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        devices(size, 2, ranks=ranks)
    assert "this machine has 2" in refused.value.message and hint in refused.value.message
    assert refused.value.param == param


def test_several_engines_on_one_named_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"device cuda:1 names one GPU.*CUDA_VISIBLE_DEVICES"):
        place(model(2, "cuda:1"), FakeHardware(4), Counter())
    assert place(model(1, "cuda:1"), FakeHardware(4), Counter({"cuda:0": 3}))[0].devices == ()
    ranks = ModelConfig(engine=EngineConfig(device="cuda:1", tensor_parallel_size=2))
    assert place(ranks, FakeHardware(4), Counter())[0].devices == ("cuda:1", "cuda:2")


def test_engines_without_a_device_are_not_pinned() -> None:
    assert [each.cpus for each in place(model(3, "null"), FakeHardware(), Counter())] == [(), (), ()]
    assert len(place(model("auto", "null"), FakeHardware(), Counter())) == 1


def test_on_a_cpu_auto_means_an_engine_for_each_numa_node() -> None:
    hardware = FakeHardware(nodes=((0, 1), (2, 3)))
    assert [each.cpus for each in place(model("auto", "cpu"), hardware, Counter())] == [(0, 1), (2, 3)]
    assert [each.cpus for each in place(model("auto", "auto"), FakeHardware(), Counter())] == [()]


@pytest.mark.parametrize(
    ("nodes", "num_engines", "expected"),
    [
        (((0, 1, 2, 3),), 2, [(0, 1), (2, 3)]),
        (((0, 1, 2, 3, 4),), 2, [(0, 1), (2, 3, 4)]),
        (((0, 1, 2), (3, 4, 5, 6)), 2, [(0, 1, 2), (3, 4, 5, 6)]),
        (((0, 2), (1, 3), (4, 6), (5, 7)), 2, [(0, 2, 1, 3), (4, 6, 5, 7)]),
        (((0, 1), (2, 3)), 3, [(0,), (1,), (2, 3)]),
        (((0, 1),), 3, [(0,), (1,), (0,)]),
        (((0,), (1, 2, 3)), 4, [(0,), (1,), (2,), (3,)]),
    ],
)
def test_cores_are_divided_within_their_nodes(
    nodes: tuple[tuple[int, ...], ...], num_engines: int, expected: list[tuple[int, ...]]
) -> None:
    assert split_cores(nodes, num_engines) == expected


def test_nodes_and_hardware_threads_are_read_where_the_system_tells(tmp_path: Path) -> None:
    assert numa_nodes(frozenset({0, 1, 5}), tmp_path) == ((0, 1, 5),)
    for node, cores in enumerate(("0-1,4-5", "2-3,6-7", "")):
        (folder := tmp_path / f"node/node{node}").mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    for core in range(8):
        (folder := tmp_path / f"cpu/cpu{core}/topology").mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    assert numa_nodes(frozenset(range(8)), tmp_path) == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert numa_nodes(frozenset({0, 1, 2, 9}), tmp_path) == ((0, 1), (2,), (9,))
