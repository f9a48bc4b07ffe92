"""The commands, as a user types them."""

import argparse
import contextlib
import csv
import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.shown_pages import Page

import shardlib as sl
from shardlib import checkpoint
from shardlib.commands import __main__ as cli
from shardlib.commands import doctor, job, model, train
from shardlib.kernels.common import build
from shardlib.plan import Link, Machine
from shardlib.plan.loss_scale import LossScale

SIZES = ["--layers", "2", "--width", "32", "--heads", "2", "--sequence", "32", "--batch", "4"]


def torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "-m", "shardlib.commands", "train", *SIZES, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests may run where it is ignored
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    return file


def test_an_interrupted_training_resumes(text, tmp_path):
    options = ["--data", text, "--out", tmp_path, "--steps", 60, "--save-every", 10, "--validate-every", 20]
    options += ["--metrics", "csv", "jsonl"]
    first = torchrun(*options)
    deadline = time.monotonic() + 120
    while checkpoint.latest(tmp_path) is None and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)  # as Ctrl-C does; torchrun passes it on
    out, _ = first.communicate()
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert f"stopped at step {checkpoint.step_of(found)}; go on with\n" in out and "--nproc-per-node=2" in out

    second = torchrun(*options)
    out, _ = second.communicate(timeout=200)
    assert second.returncode == 0, out
    assert f"resuming from {found}" in out
    assert re.search(r"order 0 \d\.\d{3}, order 1 \d\.\d{3}, order 2 \d\.\d{3}", out)
    assert re.search(r"step 60/60  loss \d\.\d{3}", out)
    # The plan's bytes come true: each row shows the same number twice.
    assert re.search(r"step 40: validation loss \d\.\d{4}  bits per byte \d\.\d{4}  perplexity \d+\.\d{4}", out)
    assert re.search(r"validation loss \d\.\d{4} nats per byte \(\d\.\d{3} bits, perplexity", out)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [int(row["step"]) for row in table] == list(range(1, 61))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 60
    assert float(table[-1]["loss"]) < float(table[0]["loss"]) and table[39]["validation/perplexity"]
    rows = re.findall(r"^(parameters|optimizer|sent on data)\s+(\d.*? \w+)\s{2,}(\d.*? \w+)\s*$", out, re.MULTILINE)
    assert len(rows) == 3 and all(predicted == measured for _, predicted, measured in rows), out
    assert "A sample:" in out and (tmp_path / "loss.png").stat().st_size > 10_000
    # The last line is the command that goes on from here.
    *_, last = out.strip().splitlines()
    assert "--nproc-per-node=2 -m shardlib.commands train" in last and last.endswith(" --steps 120")
    assert last.count("--steps") == 1 and str(tmp_path) in last


@pytest.fixture(scope="module")
def stopped(text, tmp_path_factory):
    """The arguments of a training that Ctrl-C stopped in its third step, its folder, what it printed, and its exit code."""
    out = tmp_path_factory.mktemp("run") / "here"
    given = ["train", *SIZES, "--data", str(text), "--out", str(out), "--steps", "5", "--precision", "fp32"]
    before, step = signal.signal(signal.SIGINT, signal.default_int_handler), job.Job.step

    def interrupted(self, state):
        if state.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, state)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(job.Job, "step", interrupted)
        with pytest.raises(SystemExit) as end:
            cli.main(given)
    signal.signal(signal.SIGINT, before)
    return given, out, said.getvalue(), end.value.code


def test_ctrl_c_saves_the_step_and_says_how_to_go_on(stopped):
    _, out, said, code = stopped
    assert code == 130 and checkpoint.step_of(checkpoint.latest(out)) == 3
    assert "\nstopped at step 3; go on with\n" in said and said.endswith(" --steps 5\n")


def test_a_runs_folder_knows_its_model(stopped, capsys):
    """It is not trained as another one, not removed for another one, and needs no sizes to generate."""
    given, out, _, _ = stopped
    for wrong in (["--heads", "4"], ["--heads", "4", "--steps", "2"]):
        with pytest.raises(
            SystemExit, match=r"^shardlib train: \S+step-00000003 is of a model of --heads 2: give these, "
        ):
            cli.main([*given, *wrong])
    generated = ["generate", str(out), "--prompt", "the ", "--max-new", "5"]
    assert cli.main(generated) == 0
    text = capsys.readouterr().out
    assert cli.main([*generated, *SIZES[:8]]) == 0 and capsys.readouterr().out == text
    with pytest.raises(SystemExit, match=r"^shardlib generate: \S+ holds a model of --heads 2: leave out --heads$"):
        cli.main([*generated, "--heads", "4"])
    assert cli.main(given) == 0 and "resuming from" in capsys.readouterr().out


def test_checkpoints_of_a_script_are_no_run(tmp_path, capsys):
    state, _ = sl.make_train_step(lambda p, x: p["w"].sum(), {"w": torch.ones(2)}, sl.optim.sgd(0.1))
    saved = sl.checkpoint.save(tmp_path, state)
    with pytest.raises(
        SystemExit, match=r"^shardlib train: \S+ was not saved by shardlib train: give another --out, or "
    ):
        cli.main(["train", *SIZES, "--out", str(tmp_path)])
    assert checkpoint.latest(tmp_path) == saved


def test_the_printed_command_keeps_the_arguments():
    given = ["train", "--fresh", "--steps", "30", "--data", "a text", "--stage=2"]
    wanted = [sys.executable, "-m", "shardlib.commands", "train", "--data", "a text", "--stage=2", "--steps", "60"]
    assert shlex.split(train._again(1, given, 60)) == wanted
    assert train._again(1, ["train", "--steps=30"], 60) == train._again(1, ["train"], 60)


def test_the_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"shardlib {sl.__version__}\n"


def _parsers(parser):
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from itertools.chain(*map(_parsers, action.choices.values()))


def test_every_option_of_every_command_has_help():
    found = list(_parsers(cli.make_parser()))
    assert len(found) > 14
    bare = [
        f"{parser.prog} {action.dest}"
        for parser in found
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert not bare and all("(default: None)" not in parser.format_help() for parser in found)


def test_plan_prints_what_each_rank_holds(capsys):
    assert cli.main(["plan", "--mesh", "data=4", "--stage", "3", "--precision", "fp32", *SIZES[:8]]) == 0
    out = capsys.readouterr().out
    assert "Plan on data=4" in out and "as traced" in out and "blocks/0…1/attn/qkv/weight" in out


def test_plan_refuses_what_does_not_fit(capsys):
    limits = ["--host-memory", "1GiB", "--disk", "1TiB", "--ranks-per-host", "2"]
    sharding = ["plan", "--mesh", "data=4", "--stage", "2", "--precision", "fp32", *SIZES[2:8], "--layers", "1"]
    assert cli.main([*sharding, "--device-memory", "1GiB", *limits, "--offload", "disk", "--remat", "host"]) == 0
    out = capsys.readouterr().out
    assert "\n2 ranks of a host hold " in out and "disk=1099511627776 is 1.1 TB" in out
    assert "offload('disk', folder='states')" in out and "remat(store='host')" in out
    with pytest.raises(
        SystemExit, match=r"^shardlib plan: this plan does not fit:\n  - a rank holds (.|\n)*change.* sl\."
    ):
        cli.main([*sharding, "--device-memory", "1MB", *limits])
    with pytest.raises(SystemExit):
        cli.main([*sharding, "--device-memory", "24 gigs"])
    assert "'24 gigs' is not a size" in capsys.readouterr().err


def test_a_mesh_that_cannot_be_read():
    with pytest.raises(SystemExit, match="write axes and sizes, such as data=4"):
        cli.main(["plan", "--mesh", "four"])


def test_an_unused_axis():
    with pytest.raises(SystemExit, match="axis depth is not one of data, pipe, model"):
        cli.main(["plan", "--mesh", "depth=4"])


def test_plan_and_train_sliced(text, tmp_path, capsys):
    assert cli.main(["plan", "--mesh", "data=4,model=2", "--stage", "2", *SIZES[:8]]) == 0
    assert "P('model')" in capsys.readouterr().out
    run = torchrun("--data", text, "--out", tmp_path, "--steps", 12, "--mesh", "model=2", "--stage", 2)
    out, _ = run.communicate(timeout=200)
    assert run.returncode == 0, out
    rows = re.findall(r"^(parameters|optimizer|sent on model)\s+(\d.*? \w+)\s{2,}(\d.*? \w+)\s*$", out, re.MULTILINE)
    assert len(rows) == 3 and all(predicted == measured for _, predicted, measured in rows), out


def test_plan_and_train_with_experts(text, tmp_path, capsys, monkeypatch):
    """Their shares are metrics; validation is of the tokens alone, without the routers' losses, here about 5."""
    given = model.config

    def config(args):
        made = given(args)
        return replace(made, moe=replace(made.moe, load=5.0))

    monkeypatch.setattr(model, "config", config)
    cli.main(["plan", *SIZES, "--experts", "4"])
    assert "blocks/1/moe/experts/up" in capsys.readouterr().out
    options = ["--data", text, "--out", tmp_path, "--steps", 2, "--warmup", 1, "--precision", "fp32", "--experts", 4]
    cli.main(["train", *SIZES, *map(str, options)])
    with open(tmp_path / "metrics.csv") as file:
        *_, last = csv.DictReader(file)
    assert sum(float(last[f"aux/experts/1/shares/{expert}"]) for expert in range(4)) == pytest.approx(1)
    assert float(last["loss"]) - float(last["validation/loss"]) == pytest.approx(5, abs=0.5)


def test_a_training_is_watched_and_reported(text, tmp_path, capsys):
    """Rates are among the metrics, lines stand in for the live view, and the page has the run, the plan and a profile."""
    page, options = (
        tmp_path / "run.html",
        ["train", *SIZES, "--data", str(text), "--out", str(tmp_path), "--steps", "3"],
    )
    assert cli.main([*options, "--watch", "--peak", "1e12", "--report", str(page), "--price", "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"step 3/3  loss .* tokens/s  0:00 left  lr \S+  mfu \d+\.\d%  memory \d+", out)
    with open(tmp_path / "metrics.csv") as file:
        *_, last = csv.DictReader(file)
    assert float(last["tokens_per_second"]) > 0 and 0 < float(last["mfu"]) < 1 and float(last["memory"]) > 5e7
    read = Page(page.read_text())
    assert {"seconds of a step", "parameters", "A step", "Predicted and measured", "nats per byte"} <= set(read.texts)
    assert f"{3 * 4 * 32}" in read.texts and any("order 2: " in each for each in read.texts)
    with pytest.raises(SystemExit, match="--price is for the cost in a report: give --report FILE"):
        cli.main([*options, "--price", "2"])


def test_tokens_beyond_the_bytes_have_no_text(text, tmp_path, capsys):
    """Of 4096 tokens a model that has learned nothing draws hardly a byte."""
    options = ["--vocab", "4096", "--data", str(text), "--out", str(tmp_path), "--steps", "1"]
    assert cli.main(["train", *SIZES, *options]) == 0
    assert "\ufffd" * 3 in capsys.readouterr().out.partition("A sample:")[2]


@pytest.mark.parametrize("params", [[], ["--offload-params"]], ids=["", "parameters"])
@pytest.mark.parametrize("memory", ["host", "disk"])
def test_train_with_offload(text, tmp_path, capsys, monkeypatch, memory, params):
    """What memory or files hold is what the plan says."""
    monkeypatch.chdir(tmp_path)
    options = ["--data", str(text), "--out", "out", "--steps", "3", "--offload", memory, *params]
    assert cli.main(["train", *SIZES, *options]) == 0
    out = capsys.readouterr().out
    what = "optimizer on disk" if memory == "disk" else "optimizer"
    rows = re.findall(rf"^(parameters|{what})\s+(\d.*? \w+)\s{{2,}}(\d.*? \w+)\s*$", out, re.MULTILINE)
    assert len(rows) == 2 and all(predicted == measured for _, predicted, measured in rows), out


def test_plan_and_train_in_stages(text, tmp_path, capsys):
    picture = tmp_path / "timeline.png"
    sharding = ["--mesh", "data=2,pipe=2,model=2", "--schedule", "zb-h1", "--microbatches", "4", "--stage", "2"]
    assert cli.main(["plan", *sharding, "--timeline", str(picture), *SIZES[:8]]) == 0
    assert "zb-h1: 2 ranks" in capsys.readouterr().out and picture.stat().st_size > 10_000
    with pytest.raises(SystemExit, match="give the mesh an axis pipe"):
        cli.main(["plan", "--mesh", "data=2", "--timeline", str(picture), *SIZES[:8]])
    options = ("--mesh", "pipe=2", "--microbatches", 4, "--stage", 2)
    run = torchrun("--data", text, "--out", tmp_path, "--steps", 12, *options)
    out, _ = run.communicate(timeout=200)
    assert run.returncode == 0, out
    assert "1f1b: 2 ranks" not in out and "A sample:" in out and "step 12/12" in out


def test_a_schedule_by_torchs_name_or_from_a_file(tmp_path, capsys):
    table = tmp_path / "own.csv"
    table.write_text(sl.schedules.write_table(sl.schedules.one_f_one_b(2, 4)))
    for given, message in (
        ("DualPipeV", "dualpipe-v: 2 ranks"),
        ("looped_bfs", "looped-bfs: 2"),
        (table, "own: 2 ranks"),
    ):
        assert (
            cli.main(
                [
                    "plan",
                    "--mesh",
                    "pipe=2",
                    "--schedule",
                    str(given),
                    "--microbatches",
                    "4",
                    *SIZES[:8],
                    "--layers",
                    "4",
                ]
            )
            == 0
        )
        assert message in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["plan", "--mesh", "pipe=2", "--schedule", "2f2b", *SIZES[:8]])
    assert f"'2f2b' is neither one of {', '.join(sl.schedules.NAMES)} nor a file" in capsys.readouterr().err


def test_a_range_test_proposes_a_rate(text, tmp_path, capsys):
    options = ["--data", text, "--out", tmp_path, "--steps", 60, "--max-lr", 10, "--stage", 2, "--dropout", 0.1, *SIZES]
    assert cli.main(["lr-range-test", *map(str, options)]) == 0
    out = capsys.readouterr().out
    proposed = float(re.search(r"proposed: --lr (\S+)", out)[1])
    assert 1e-4 < proposed < 0.1
    assert (tmp_path / "range_test.png").stat().st_size > 10_000
    rows = (tmp_path / "range_test.csv").read_text().splitlines()
    assert rows[0] == "step,loss,lr" and float(rows[1].split(",")[2]) == pytest.approx(1e-5)


def test_a_range_test_waits_for_the_loss_scale(text, tmp_path, monkeypatch, capsys):
    """Steps that fp16 skips at first are no divergence, and the rate does not rise for them."""
    too_large = LossScale(2.0**40, factor=2.0**16)  # one is tolerated, then 2^24, then 2^8
    monkeypatch.setattr(model, "precision", partial(sl.precision, loss_scale=too_large))
    sizes = ["--layers", 1, "--width", 16, "--heads", 2, "--sequence", 16, "--batch", 2, "--precision", "fp16"]
    options = ["--data", text, "--out", tmp_path, "--steps", 20, "--max-lr", 0.1, *sizes]
    assert cli.main(["lr-range-test", *map(str, options)]) == 0
    assert "diverged" not in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "range_test.csv").open()))
    assert int(rows[0]["step"]) > 2 and float(rows[0]["lr"]) == pytest.approx(1e-5)


def test_a_profile_is_printed_drawn_and_traced(text, tmp_path, capsys):
    options = ["--data", text, "--out", tmp_path, "--steps", 1, "--stage", 3, "--remat", *SIZES]
    assert cli.main(["profile", *map(str, options)]) == 0
    out = capsys.readouterr().out
    for part in ("GFLOP", "of the peak", "blocks/0", "recompute", "predicted", "planned", "activations", "optimizer"):
        assert part in out
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for name in ("profile", "exchanges", "memory"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["train", "lr-range-test", "plan"])
def test_without_matplotlib_a_command_says_so_in_a_line(command, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    options = ["--data", text, "--out", tmp_path, "--steps", 12, "--max-lr", 1]
    if command == "plan":
        options = ["--mesh", "pipe=2", "--microbatches", 2, "--timeline", tmp_path / "timeline.png"]
    elif command == "train":
        options = options[:-2]
    assert cli.main([command, *map(str, [*options, *SIZES])]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "matplotlib" in line]
    assert re.match(
        r"no (loss plot|plot|timeline): a plot needs matplotlib: pip install 'shardlib\[notebooks\]', or ", line
    )


@pytest.mark.parametrize("name, module", [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_writer_is_reported_before_the_work(name, module, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("shardlib.commands.job.Job", None)  # never made
    with pytest.raises(SystemExit, match=rf"shardlib train: a writer for {name} needs {name}: pip install"):
        cli.main(["train", "--data", str(text), "--out", str(tmp_path), "--metrics", "csv", name, *SIZES])
    assert not capsys.readouterr().out


def test_a_range_test_needs_a_range():
    with pytest.raises(SystemExit, match="0 < --min-lr < --max-lr"):
        cli.main(["lr-range-test", "--min-lr", "1", "--max-lr", "0.1"])


def test_doctor_names_versions_devices_and_kernels(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for part in (
        "torch",
        "gloo",
        "g++",
        "adamw on cpu",
        "C++",
        "onebit on cpu",
        "quantize on cpu",
    ):
        assert part in out


def test_doctor_counts_what_it_compiles(capsys, monkeypatch):
    """Two kernels are missing; one of them cannot be compiled, which its row says."""
    told = []

    def compile(recipe, place):
        told.append((recipe.name, place))
        raise build.BuildError("no")

    monkeypatch.setattr(build, "is_built", lambda recipe: recipe.name not in ("adamw", "gelu"))
    monkeypatch.setattr(build, "shared_library", compile)
    assert cli.main(["doctor"]) == 0
    assert told == [("adamw", "1 of 2"), ("gelu", "2 of 2")] and "adamw on cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    "said, version",
    [
        (
            "nvcc: NVIDIA (R) Cuda compiler driver\nCopyright (c) 2005-2023 NVIDIA Corporation\n"
            "Built on Tue_Jun_13_19:16:58_PDT_2023\nCuda compilation tools, release 12.2, V12.2.91\n"
            "Build cuda_12.2.r12.2/compiler.32965470_0\n",
            "Cuda compilation tools, release 12.2, V12.2.91",
        ),
        ("g++ (Debian 12.2.0-14) 12.2.0\nCopyright (C) 2022 Free Software\n", "g++ (Debian 12.2.0-14) 12.2.0"),
        ("Debian clang version 14.0.6\nTarget: x86_64-pc-linux-gnu\n", "Debian clang version 14.0.6"),
        ("1.11.1.git.kitware\n", "1.11.1.git.kitware"),
        ("no version\n", None),
    ],
)
def test_doctor_finds_a_compilers_version(said, version):
    assert doctor.version_line(said) == version


def test_doctor_says_what_a_missing_compiler_costs_and_how_to_name_one(capsys, monkeypatch):
    monkeypatch.setenv("NVCC", "no-such-compiler")
    assert cli.main(["doctor"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("nvcc"))
    assert "no-such-compiler not found; install it or set NVCC" in row and "next implementation" in row


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with files of all kinds that commands read, but good ones."""
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "bad.json": "{",
        "list.json": "[]",
        "short.txt": "ab",
        "middle.txt": "the quick brown fox\n" * 600,
        "a.jsonl": '{"text": "one"}\n{"words": "two"}\n',
        "number.jsonl": '{"text": 3}\n',
    }.items():
        (tmp_path / name).write_text(content)
    sl.data.write_tokens("a.tokens", [b"one"])
    sl.data.write_tokens("words.tokens", [[1, 300]], vocabulary=400, tokenizer="words")
    machine = Machine("1GiB", {"fp32": 1e10}, Link(1e9, 1e-5), ranks_per_host=8)
    machine.write("machine.json")
    replace(machine, flops={"fp16": 1e10}).write("half.json")


@pytest.mark.parametrize(
    "command, message",
    [
        ("plan --width 250 --heads 4", "shardlib plan: GPTConfig: heads=4 does not divide width=250; choose"),
        ("plan --width 0", "argument --width: '0' is not an integer of at least 1"),
        ("plan --layers 0", "argument --layers: '0'"),
        ("plan --dropout 2", "argument --dropout: '2' is not a number from 0 to below 1"),
        ("plan --dropout nan", "argument --dropout: 'nan'"),
        ("plan --experts 1", "shardlib plan: --experts 1: a token uses two experts"),
        ("plan --experts -2", "argument --experts: '-2' is not an integer of at least 0"),
        ("plan --mesh data=2,model=2,data=4", "axis data stands there twice: give each axis one size"),
        ("plan --microbatches 0", "argument --microbatches: '0'"),
        ("plan --remat auto", "give --device-memory, such as 24GiB, or --remat"),
        ("plan --search --machine nofile", "shardlib plan: [Errno 2] No such file or directory: 'nofile'"),
        ("plan --search --machine .", "shardlib plan: [Errno 21] Is a directory: '.'"),
        ("plan --search --machine bad.json", "shardlib plan: bad.json describes no machine: Expecting"),
        ("plan --search --machine list.json", "shardlib plan: list.json describes no machine: a list"),
        (
            "plan --search --machine half.json --ranks 2 --layers 1",
            "shardlib plan: the machine has no rate for fp32, bf16",
        ),
        ("doctor --measure --ranks 0", "argument --ranks: '0'"),
        ("doctor --out f.json", "--out and --ranks are of what --measure measures: give it too"),
        ("doctor --ranks 2", "--out and --ranks are of what --measure measures"),
        ("analyze . --out x", "shardlib analyze: [Errno 21] Is a directory: '.'"),
        ("analyze --dataset mine:rows --sequence -3 --out x", "argument --sequence: '-3'"),
        ("analyze --dataset mine:rows --sequence 3 --out x", "--sequence and --packed cut a token file"),
        ("tokenize short.txt --out .", "tokenize: --out . is a folder"),
        ("tokenize a.jsonl --out x", "a.jsonl, line 2 is no JSON object with a field 'text'"),
        ("tokenize bad.json number.jsonl --out x", "number.jsonl, line 1: the field 'text' is int, not text"),
        ("tokenize middle.txt a.tokens --out x", "tokenize: a.tokens is a token file already: give the text"),
        (
            "analyze middle.txt --out x",
            "shardlib analyze: middle.txt is not a token file; make one with shardlib tokenize",
        ),
        ("train --data words.tokens", "shardlib train: words.tokens has tokens of the tokenizer 'words', not bytes"),
        ("profile --data nofile", "shardlib profile: no file or folder of text at nofile"),
        ("profile --data short.txt", "shardlib profile: split: 2 bytes are too few"),
        ("profile --data middle.txt --sequence 99999", "bytes hold no window of 99999"),
        ("profile --batch 0", "argument --batch: '0'"),
        (
            "profile --mesh data=2",
            "shardlib profile: the mesh data=2 has 2 ranks and 1 process runs; start it with torchrun",
        ),
        ("profile --remat auto", "shardlib profile: --remat auto is for shardlib plan"),
        ("profile --data middle.txt --vocab 255", "shardlib profile: --vocab 255: the text's tokens are bytes, 256 of"),
        ("profile --data middle.txt --clip -1", "shardlib profile: clip_by_global_norm(max_norm=-1.0)"),
        ("generate . --prompt a --mesh data=2", "shardlib generate: the mesh data=2 has 2 ranks"),
        ("lr-range-test --data nofile", "shardlib lr-range-test: no file or folder of text at nofile"),
        ("train --data middle.txt --batch 64", "600 bytes are set aside for validation, a twentieth of the text"),
        ("train --out middle.txt", "argument --out: 'middle.txt' is a file: give a folder"),
        ("checkpoint export . --to middle.txt", "argument --to: 'middle.txt' is a file"),
        ("train --lr -1", "argument --lr: '-1' is not a number above 0"),
        ("train --steps 0", "argument --steps: '0'"),
        ("train --save-every 0", "argument --save-every: '0'"),
    ],
)
def test_wrong_arguments_are_one_line(command, message, files, capsys):
    """And no error of another kind; the command's name comes first."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(command.split())
    said = capsys.readouterr().err if stopped.value.code == 2 else stopped.value.code
    assert message in said and re.match(rf"shardlib {command.split()[0]}(?: export)?: ", said)


def test_errors_of_other_kinds_keep_their_tracebacks(files, monkeypatch):
    def broken(*args, **options):
        raise ValueError("a defect")

    monkeypatch.setattr("shardlib.commands.plan.make_plan", broken)
    with pytest.raises(ValueError, match="a defect"):
        cli.main(["plan", *SIZES])
    monkeypatch.setattr("shardlib.commands.plan.search_plan", broken)
    with pytest.raises(ValueError, match="a defect"):
        cli.main(["plan", "--search", "--machine", "machine.json", "--ranks", "1", *SIZES])


@pytest.mark.parametrize(
    "wrong",
    [
        ["--mesh", "data=0"],
        ["--mesh", "data=2", "--batch", "8", "--microbatches", "3"],
        ["--batch", "0"],
        ["--device-memory", "1GB", "--ranks-per-host", "-1"],
    ],
)
def test_a_plan_that_cannot_be_made_is_one_message(wrong, capsys):
    small = ["--layers", "1", "--width", "16", "--heads", "2", "--sequence", "16"]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", *small, *wrong])
    assert "shardlib plan: " in f"{stopped.value}{capsys.readouterr().err}"
