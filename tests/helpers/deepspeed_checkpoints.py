"""Small checkpoints of real DeepSpeed, of ZeRO stages 1 to 3 on two ranks, with what they hold by DeepSpeed's own account.

``python -m helpers.deepspeed_checkpoints FOLDER`` makes them, where deepspeed 0.19.8 is installed; those in
tests/checkpoint/made_by_deepspeed/ were made so. Stages 2 and 3 train in bf16, so that masters differ from parameters; stage
3 splits its groups into several flat tensors.
"""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

STAGES, RANKS, STEPS = (1, 2, 3), 2, 3
FOUND, MODEL = "found.pt", "mp_rank_00_model_states.pt"


class Model(nn.Module):
    """Weights and biases of sizes that two ranks do not divide, a frozen parameter, a tied one, and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(5, 7)
        self.body = nn.Linear(7, 5)
        self.shift = nn.Parameter(torch.linspace(0.1, 0.7, 7), requires_grad=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor([3.0, 4.0]))

    def forward(self, x):
        x = self.body(torch.tanh(self.embed(x)) + self.shift)
        return self.head(x).float().square().mean()


def main(folder):
    """Start the ranks, and wait for them."""
    environment = os.environ | {
        "WORLD_SIZE": str(RANKS), "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1", "STORE": str(Path(folder) / "store"),
    }  # fmt: skip
    Path(folder).mkdir(parents=True, exist_ok=True)
    code = f"from helpers import deepspeed_checkpoints as made; made.rank({str(folder)!r})"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    errors = [process.communicate()[1] for process in ranks]
    assert not any(process.returncode for process in ranks), "\n".join(errors)
    (Path(folder) / "store").unlink(missing_ok=True)


def rank(folder):
    """Train and save on one of the ranks."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(os.environ["STORE"], RANKS), timeout=timedelta(seconds=60),
        rank=int(os.environ["RANK"]), world_size=RANKS,
    )  # fmt: skip
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # else it compiles an exchange in shared memory, for minutes
    for stage in STAGES:
        train(deepspeed, Path(folder) / f"stage{stage}", stage)


def train(deepspeed, folder, stage):
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    model = Model()
    groups = [
        {"params": [each for name, each in model.named_parameters() if each.requires_grad and name.endswith(ending)]}
        for ending in ("weight", "bias")
    ]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, 0.1, betas=(0.8, 0.9)),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": stage > 1},
            "zero_optimization": {"stage": stage, "sub_group_size": 20, "reduce_bucket_size": 1000},
        },
        dist_init_required=False,
    )
    dtype = torch.bfloat16 if stage > 1 else torch.float32
    for step in range(STEPS):
        batch = torch.linspace(-1, 1, 10).view(2, 5) + step + torch.distributed.get_rank()
        engine.backward(engine(batch.to(dtype)))
        engine.step()
    engine.save_checkpoint(str(folder), client_state={"epoch": 4})
    if stage < 3:  # DeepSpeed looks for the moments after the first group's update, when the others have none
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {
        name: {
            "param": safe_get_full_fp32_param(each),
            "exp_avg": safe_get_full_optimizer_state(each, "exp_avg"),
            "exp_avg_sq": safe_get_full_optimizer_state(each, "exp_avg_sq"),
        }
        for name, each in engine.module.named_parameters()
        if each.requires_grad
    }
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        for script in folder.glob("zero_to_*.py"):
            script.unlink()
        whole = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        torch.save({"zero_to_fp32": dict(whole), "by parameter": found}, folder / FOUND)


if __name__ == "__main__":
    main(sys.argv[1])
