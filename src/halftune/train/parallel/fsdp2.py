"""Fully sharded data parallelism with torch's ``fully_shard``: each process holds a share of every weight."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any, ClassVar

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from halftune.config.facts.media import part_of
from halftune.core.errors import PlanError
from halftune.core.log import get_logger
from halftune.core.table import did_you_mean
from halftune.model.load.lazy_weights import CPU, LazyWeights
from halftune.model.load.parts import trained_in_towers
from halftune.model.load.towers import towers_of
from halftune.plan import ParallelPlan
from halftune.precision.dtypes import mark_kept, stays_fp32, torch_dtype
from halftune.train.parallel.barrier import barrier
from halftune.train.parallel.processes import sum_over_processes
from halftune.train.parallel.reading import fill, show
from halftune.train.parallel.strategy import Strategy

log = get_logger(__name__)


class Fsdp2(Strategy):
    """One code path for CPU and GPU: accelerate silently disables FSDP on a CPU."""

    name: ClassVar[str] = "fsdp2"
    sharded: ClassVar[bool] = True

    def place(self, model: nn.Module, lazy: LazyWeights | None = None) -> None:
        """Nothing: a whole model may not fit there; layer by layer goes there when it is sharded.

        Of a model that has not been read, a layer of each kind is: by what it computes operators recognise it.
        """
        if lazy is not None and self.plan.batch.fused_layers.value:
            assert self.plan.parallel is not None, "fsdp2 is planned for several processes only"
            show(model, modules_to_wrap(model, self.plan.parallel.wrap), lazy)

    def wrap(self, model: nn.Module, lazy: LazyWeights | None = None) -> nn.Module:
        """Shards ``model`` in place: layers of towers and decoder (or ``wrap``) one by one, then all that is left.

        Raises:
            PlanError: a layer's trained weights have several dtypes, or there is no module to wrap.
            ModelError: the weights' files cannot be read.
        """
        parallel = self.plan.parallel
        assert parallel is not None, "fsdp2 is planned for several processes only"
        device = self.accelerator.device
        mesh = init_device_mesh(device.type, (self.accelerator.num_processes,), mesh_dim_names=("shard",))
        _check_dtypes(model)
        layers = modules_to_wrap(model, parallel.wrap)
        kept = [name for name, parameter in model.named_parameters() if stays_fp32(name, parameter, ())]
        for layer in layers:
            self._shard(layer, mesh, parallel, reshard=parallel.reshard)
        # generation calls the model below an adapter, so that one is the root whose forward pass gathers what is left
        root = model.get_base_model() if isinstance(model, PeftModel) else model
        prefetch(layers, idle_in_towers(root))
        self._shard(root, mesh, parallel, reshard=None)
        assert isinstance(root, FSDPModule), "fully_shard has made it one"
        self.root, self.syncing = root, True
        self._check(model)
        if lazy is not None:
            fill(model, lazy, CPU if parallel.offload else device)
        for name in kept:  # sharding makes new parameters
            mark_kept(model.get_parameter(name))
        self.in_towers = trained_in_towers(model)
        kinds = ", ".join(dict.fromkeys(type(layer).__name__ for layer in layers))
        log.info("fsdp2: %d modules (%s) in %d shards", len(layers), kinds, mesh.size())
        return model

    def _shard(self, module: nn.Module, mesh: DeviceMesh, parallel: ParallelPlan, *, reshard: bool | None) -> None:
        """Shards one group; the linear layers in it apart where they are gathered in another dtype."""
        reduce = torch_dtype(parallel.reduce.value)
        stored = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
        offload = CPUOffloadPolicy() if parallel.offload else OffloadPolicy()
        options: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
        # The root's own weights stay gathered from its forward to its backward pass, which begins right after.
        options["reshard_after_forward"] = reshard
        if reshard is not None and parallel.param.value != self.plan.precision.storage.value:
            cast = MixedPrecisionPolicy(torch_dtype(parallel.param.value), reduce, cast_forward_inputs=False)
            if linear := linear_layers(module, float8=self.plan.precision.trains_in_float8):
                fully_shard(linear, mp_policy=cast, **options)
        fully_shard(module, mp_policy=stored, **options)

    def _check(self, model: nn.Module) -> None:
        apart = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
        if apart:
            what = f"fsdp2 was planned, but {len(apart)} weights are not sharded, first {apart[0]}"
            raise PlanError(what, code="train.sharding_failed")

    @contextmanager
    def accumulating(self, wrapped: nn.Module, *, last: bool) -> Iterator[None]:
        """See :class:`Strategy`. Until they are reduced, gradients are whole on each device: the plan says when."""
        assert self.plan.parallel is not None, "fsdp2 is planned for several processes only"
        sync = last or self.plan.parallel.sync_each.value
        if sync != self.syncing:
            self.syncing = sync
            self.root.set_requires_gradient_sync(sync)
        yield
        for weight in self.in_towers if last else ():
            if weight.grad is None:  # no output depends on it: the last layer of LLaVA's tower
                weight.grad = torch.zeros_like(weight)

    def total_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """See :class:`Strategy`."""
        if (
            self.plan.parallel is not None and self.plan.parallel.offload
        ):  # collectives run between devices, not in main memory
            own = float(nn.utils.get_total_norm([one.to_local() for one in gradients if isinstance(one, DTensor)]))
            return torch.tensor(math.sqrt(sum_over_processes(self.accelerator, [own**2])[0]))
        norm = nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def after_evaluation(self, wrapped: nn.Module) -> None:
        """See :func:`reshard`."""
        reshard(wrapped)

    @contextmanager
    def generating(self, model: nn.Module) -> Iterator[None]:
        """See :class:`Strategy`. Each weight is gathered once, where the plan has room for all of them."""
        assert self.plan.parallel is not None, "fsdp2 is planned for several processes only"
        parts = [one for one in model.modules() if isinstance(one, FSDPModule) and one is not self.root]
        once = self.plan.parallel.gather_once
        kept = parts if once is not None and once.value and self.plan.parallel.reshard else []
        for one in kept:
            one.set_reshard_after_forward(False, recurse=False)
        self.root._get_fsdp_state()._lazy_init()
        self.root.unshard()  # generation encodes media before the root's forward pass
        try:
            yield
        finally:
            for one in kept:
                one.set_reshard_after_forward(True, recurse=False)
            reshard(model)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :class:`Strategy`."""
        if not isinstance(tensor, DTensor):
            return tensor
        if tensor.device.type != self.accelerator.device.type:  # offloaded: from_local takes it to the mesh's device
            place = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
            tensor = DTensor.from_local(tensor.to_local(), tensor.device_mesh, tensor.placements, **place)
        return tensor.full_tensor()

    def result(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]] | None:
        """See :class:`Strategy`. One tensor after the other is gathered; only the main process keeps it.

        Of a model under an adapter only what is trained, tied tensors under each name; else each tensor once.
        """
        adapted, done = isinstance(model, PeftModel), {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if adapted and not tensor.requires_grad:
                continue
            if id(tensor) in done:
                if adapted:
                    yield name, done[id(tensor)]
                continue
            if not adapted:  # the main process may be writing what it has
                barrier(self.accelerator.num_processes)
            whole = self.whole(tensor.detach())
            whole = whole.cpu() if self.accelerator.is_main_process else whole.new_empty(0)
            done[id(tensor)] = whole if adapted else None
            yield name, whole


def prefetch(layers: Sequence[nn.Module], idle: Container[object] = ()) -> None:
    """Gather the next layer while one computes, in both directions; by itself, torch does so when a layer is reached.

    Args:
        layers: sharded modules in the order of the forward pass; a layer's own groups are gathered with it.
        idle: those that have no backward pass.
    """
    groups = [_groups(layer) for layer in layers]
    for before, after in pairwise(groups):
        before[0].set_modules_to_forward_prefetch(after)
        # The backward pass comes to the last one first. Without any, torch gathers what was computed before.
        after[0].set_modules_to_backward_prefetch(after[:1] if before[0] in idle else before[::-1])


def _groups(layer: nn.Module) -> list[FSDPModule]:
    """The layer, and one module of each group of weights in it that is gathered apart."""
    states = {}
    for module in layer.modules():
        if isinstance(module, FSDPModule):
            states.setdefault(id(module._get_fsdp_state()), module)
    return list(states.values())


def reshard(model: nn.Module) -> None:
    """Frees the weights that forward passes have gathered; a backward pass does so by itself."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def modules_to_wrap(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules that are gathered one after the other: those of the classes named, or the layers.

    Those of towers come first, as in the forward pass.

    Raises:
        PlanError: there is no such module.
    """
    if not names:
        lists = _lists_of_layers(model)
        return [*chain.from_iterable(lists[name] for name in sorted(lists, key=lambda name: not name))]
    every = [(type(module).__name__, module) for module in model.modules()]
    for name in names:
        if name not in (classes := dict(every)):
            what, remedy = f"this model has no module of the class {name}", did_you_mean(name, classes)
            raise PlanError(what, where="distributed.fsdp.wrap", remedy=remedy, code="plan.bad_wrap")
    return [module for name, module in every if name in names]


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of the language model.

    Raises:
        PlanError: there are none.
    """
    return list(_lists_of_layers(model)[""])


def _lists_of_layers(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Of each tower, by its name, and of the language model (""), the list of modules that holds the most weights."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    towers = towers_of(base)
    found: dict[str, nn.ModuleList] = {}
    for name, module in base.named_modules():
        root = next((one for one in towers.roots if name.startswith(f"{one}.")), "") if towers else ""
        if isinstance(module, nn.ModuleList) and len(module) and not (root and part_of(name) == "projector"):
            found[root] = max(found.get(root, module), module, key=lambda one: sum(map(torch.numel, one.parameters())))
    if "" not in found:
        what = "the model has no list of layers"
        raise PlanError(what, remedy="name their class in distributed.fsdp.wrap", code="plan.bad_wrap")
    return found


def idle_in_towers(model: nn.Module) -> set[nn.Module]:
    """The modules of towers of which nothing is trained."""
    if (towers := towers_of(model)) is None:
        return set()
    inside = (module for name, module in model.named_modules() if towers.contain(name))
    return {module for module in inside if not any(one.requires_grad for one in module.parameters())}


def linear_layers(module: nn.Module, *, float8: bool = False) -> list[nn.Module]:
    """Linear layers whose weights autocast casts: frozen bases under an adapter are stored in the compute dtype.

    Args:
        module: holds them.
        float8: whether some are torchao's, which round what is gathered: float8 would be gathered with one scale only.
    """
    kinds: tuple[type, ...] = (nn.Linear,)
    if float8:
        from torchao.float8.float8_linear import Float8Linear  # few runs have torchao

        kinds += (Float8Linear,)
    return [
        child
        for child in module.modules()
        if type(child) in kinds and child.weight.dtype == torch.float32 and not isinstance(child, BaseTunerLayer)
    ]


def _check_dtypes(model: nn.Module) -> None:
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if len(dtypes) > 1:
        raise PlanError(
            f"fsdp2 reduces gradients of one dtype only, and the trained weights have {len(dtypes)}: "
            f"{', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}",
            where="precision.trainable",
            remedy="precision.trainable: auto, or distributed.strategy: ddp",
            code="precision.trainable_conflict",
        )
