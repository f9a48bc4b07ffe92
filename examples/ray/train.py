"""Ray Train starts the ranks of a run, on the hosts of a Ray cluster, and starts all again when one of them or its host dies:

    python examples/ray/train.py /shared/run --workers 16 --gpus

`train` is any rank's program, as under torchrun: it restores the newest checkpoint, and saves.
"""

import argparse
import os

import torch
import torch.nn.functional as F

import shardlib as sl


def loss_fn(params, batch):
    return F.mse_loss(F.linear(F.linear(batch["x"], params["up"]).relu(), params["down"]), batch["y"])


def train(config, report, device=None):
    mesh = sl.make_mesh(device)  # of the process group that Ray Train has started
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(1024, 64, generator=generator)
    samples = [{"x": x, "y": x[:8].relu()} for x in xs]
    params = {
        "up": torch.randn(256, 64, generator=generator) / 8,
        "down": torch.randn(8, 256, generator=generator) / 16,
    }
    state, train_step = sl.make_train_step(loss_fn, sl.shard(params, mesh, stage=3), sl.optim.adamw(1e-3))
    batches = sl.data.loader(samples, state, batch=64)
    with sl.checkpoint.Manager(config["out"], keep=3, every=config["every"]) as manager:
        if manager.latest():
            state = manager.restore(state)
            batches.load_state_dict(sl.checkpoint.read_notes(config["out"]))
        for batch in batches:
            if state.step >= config["steps"]:
                break
            state, metrics = train_step(state, batch)
            if state.step % config["every"] == 0:  # Ray Train waits for all workers' reports
                report({"step": state.step, "loss": float(metrics["loss"])})
            manager.step(state, notes=batches.state_dict())


def worker(config):
    import ray.train
    import ray.train.torch

    train(config, ray.train.report, ray.train.torch.get_device())


def main():
    import ray.train
    import ray.train.torch

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", help="a folder that all hosts see")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one for each worker")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    args = parser.parse_args()
    out = os.path.abspath(args.out)
    trainer = ray.train.torch.TorchTrainer(
        worker,
        train_loop_config={"out": os.path.join(out, "checkpoints"), "steps": args.steps, "every": args.every},
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        torch_config=ray.train.torch.TorchConfig(timeout_s=600),
        run_config=ray.train.RunConfig(
            name="ray", storage_path=out, failure_config=ray.train.FailureConfig(max_failures=20)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
