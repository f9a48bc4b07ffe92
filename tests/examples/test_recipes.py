"""The scripts in `examples/` learn what they are for, on two ranks."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.languages import save_model

EXAMPLES = Path(__file__).parents[2] / "examples"
DRAWN = random.Random(0)
WORDS = ["def", "class", "import", "return"]
# Chosen is what repeats the prompt's word.
PAIRS = [
    {"prompt": f"{word} {DRAWN.randint(0, 99)}: ", "chosen": f"{word} yes", "rejected": f"{DRAWN.choice('xyz')} no"}
    for word in DRAWN.choices(WORDS, k=96)
]


def run(script, folder, records, *options):
    save_model(folder / "model")
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", EXAMPLES / script]
    words = [*command, folder / "model", folder / "records.jsonl", "--out", folder / "tuned", *options]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "tuned" / "model.safetensors").exists()
    return done.stdout


def test_preferences_hold_for_pairs_that_were_not_seen(tmp_path):
    out = run("dpo.py", tmp_path, PAIRS, "--lr", 2e-3, "--steps", 30, "--length", 48)
    assert float(re.search(r"held out: accuracy (\d\.\d+)", out)[1]) >= 0.9


def test_rewards_rise(tmp_path):
    records = [{"prompt": f"count {number}: "} for number in range(8)]
    out = run("grpo.py", tmp_path, records, "--lr", 1e-2, "--steps", 20, "--max-new", 8, "--prompts-per-step", 4)
    rewards = [float(each) for each in re.findall(r"reward (\d\.\d+)", out)]
    assert len(rewards) == 20 and sum(rewards[-4:]) > 4 * sum(rewards[:4])


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_a_recipe_is_short(script):
    assert len(script.read_text().splitlines()) <= 120
