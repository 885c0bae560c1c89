"""Masks held in two processes (gloo): DDP, FSDP2, and FSDP1, which is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from support.trained import lost, pruned_net, train, zeros
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import twofour
from twofour.errors import BadInputError, PatternBrokenError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.full
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    """What each of the two processes found."""
    folder = tmp_path_factory.mktemp("processes")
    spawn(_process, (folder,), nprocs=2)  # type: ignore[no-untyped-call]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def _process(rank: int, folder: Path) -> None:
    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    facts = {"ddp": _ddp(rank), "fsdp2": _fsdp2(rank), "fsdp1": _fsdp1()}
    (folder / f"{rank}.json").write_text(json.dumps(facts))
    distributed.destroy_process_group()


def _broken(holder: twofour.MaskHolder) -> str:
    try:
        holder.verify()
    except PatternBrokenError as error:
        return error.message
    return ""


def _ddp(rank: int) -> Facts:
    model = pruned_net()
    masks = zeros(model)
    parallel = DistributedDataParallel(model)
    optimizer = AdamW(model.parameters(), lr=0.01)
    holder = twofour.hold_masks(parallel, optimizer)
    torch.manual_seed(rank)
    train(parallel, optimizer)
    facts: Facts = {"lost": lost(model, masks), "verified": _broken(holder)}
    weight = model.get_parameter("0.weight")
    facts["weights"] = float(weight.detach().double().sum())
    if rank:
        with torch.no_grad():
            weight[masks["0.weight"]] = 1
    return facts | {"broken": _broken(holder), "names": sorted(holder.state_dict())}


def _shard(model: nn.Sequential) -> nn.Sequential:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model


def _fsdp2(rank: int) -> Facts:
    masks, plain = zeros(pruned_net()), pruned_net()
    saved = twofour.hold_masks(plain, AdamW(plain.parameters())).state_dict()
    early = pruned_net()
    held_early = twofour.hold_masks(early, AdamW(early.parameters()))
    held, free, early = _shard(pruned_net()), _shard(pruned_net()), _shard(early)
    facts: Facts = {}
    for name, model in {"held": held, "free": free, "early": early}.items():
        optimizer = AdamW(model.parameters(), lr=0.01)
        if name == "held":
            holder = twofour.hold_masks(model, optimizer)
        elif name == "early":
            held_early.add_optimizer(optimizer)
        torch.manual_seed(rank)
        train(model, optimizer)
        gradient = cast("DTensor", model.get_parameter("0.weight").grad).full_tensor()
        facts[name] = (lost(model, masks), int((gradient[masks["0.weight"]] != 0).sum()))
    facts["verified"] = _broken(holder) + _broken(held_early)
    facts["same masks"] = all(torch.equal(saved[n], m) for n, m in holder.state_dict().items())
    holder.load_state_dict(saved)
    facts["verified again"] = _broken(holder)
    if rank:
        with torch.no_grad():
            cast("DTensor", held.get_parameter("0.weight")).to_local().fill_(1)
    return facts | {"broken": _broken(holder)}


def _fsdp1() -> Facts:
    from torch.distributed.fsdp import FullyShardedDataParallel

    found = {}
    for original in (False, True):
        held = pruned_net()
        holder = twofour.hold_masks(held, AdamW(held.parameters()))
        for name, model in {"new": copy.deepcopy(held), "held": held}.items():
            cpu = torch.device("cpu")
            flat = FullyShardedDataParallel(model, use_orig_params=original, device_id=cpu)
            optimizer = AdamW(flat.parameters(), lr=0.01)
            try:
                if name == "new":
                    twofour.hold_masks(flat, optimizer)
                else:
                    holder.add_optimizer(optimizer)
            except BadInputError as error:
                found[f"{name} {original}"] = error.message
    return found


def test_ddp_holds(processes: list[Facts]) -> None:
    first, second = (facts["ddp"] for facts in processes)
    assert (first["lost"], second["lost"], first["verified"]) == (0, 0, "")
    assert first["weights"] == second["weights"]
    assert first["names"] == ["0.weight", "2.weight"]
    said = "512 values under the masks are not zero, in all processes together; in this one: "
    assert (first["broken"], second["broken"]) == (f"{said}none", f"{said}0.weight (512)")


def test_fsdp2_holds_shards_and_masks_made_before_sharding(processes: list[Facts]) -> None:
    for facts in (each["fsdp2"] for each in processes):
        assert facts["held"] == facts["early"] == [0, 0]
        assert facts["free"][0] > 300
        assert facts["free"][1] > 100
        assert (facts["verified"], facts["same masks"], facts["verified again"]) == ("", True, "")
        assert facts["broken"].startswith("256 values under")


def test_fsdp1_is_refused(processes: list[Facts]) -> None:
    for facts in (each["fsdp1"] for each in processes):
        assert facts["new False"] == facts["new True"]
        assert facts["new True"].startswith("FullyShardedDataParallel (FSDP1) flattens weights")
        assert "no weight 0.weight" in facts["held False"]
        assert "mask is [64, 16]" in facts["held True"]
