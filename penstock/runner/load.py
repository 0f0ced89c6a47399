"""Builds a runner from a resolved configuration. Torch is imported only for runners that compute."""

from __future__ import annotations

from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig, Machine, Resolved, available_cpus, resolve
from penstock.runner.base import Runner


def settle(config: EngineConfig, spec: ModelSpec) -> Resolved:
    machine = this_machine(config.device)
    return resolve(config, model_limit=spec.limit, positions=spec.positions, machine=machine)


def this_machine(device: str) -> Machine:
    cpus = available_cpus()
    if device in ("cpu", "null"):
        return Machine(cpus=cpus, cuda=False)
    import torch

    cuda = torch.cuda.is_available()
    return Machine(cpus=cpus, cuda=cuda, bf16=cuda and torch.cuda.is_bf16_supported())


def load_runner(spec: ModelSpec, settings: Resolved) -> Runner:
    if settings.device == "null":
        from penstock.runner.null import NullRunner

        return NullRunner({task: spec.width(task) for task in spec.tasks})
    return _model_runner(spec, settings)


def _model_runner(spec: ModelSpec, settings: Resolved) -> Runner:
    import torch

    from penstock.layers.build import LayerBuilder
    from penstock.models.registry import build_model
    from penstock.pooling.build import build_pooler
    from penstock.runner.model_runner import ModelRunner
    from penstock.runner.warmup import warm_up
    from penstock.weights.stream import open_weights

    device = torch.device(settings.device)
    if device.type == "cpu":
        torch.set_num_threads(settings.threads)
    weights = open_weights(
        spec.path, settings.load_format, settings.seed, getattr(torch, settings.dtype), device
    )
    with torch.inference_mode():
        model = build_model(spec.architecture, spec.config, LayerBuilder(weights, settings.quantization))
        pooler = build_pooler(spec, model.heads, settings.load_format, settings.seed, device)
    runner = ModelRunner(model, pooler, device, settings.pipeline_depth)
    warm_up(runner, min(settings.max_model_len, settings.max_num_batched_tokens))
    return runner
