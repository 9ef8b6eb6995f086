"""One of two processes that train TRL's GRPO as it comes and on the tree; what it found goes to RANK.json.

RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python trl_two_processes.py FOLDER
"""

import json
import os
import sys
from pathlib import Path

from test_trl import group_trainer
from trl import GRPOTrainer
from trl_arms import calls_of, run

from harts.integrations.trl import HartsGRPOTrainer


def main(folder: Path) -> None:
    """Trains both arms."""
    found = {}
    for name, kind in (("stock", GRPOTrainer), ("harts", HartsGRPOTrainer)):
        trainer = group_trainer(kind, folder, "tiny-qwen3")
        assert trainer.accelerator.num_processes == 2
        rows = calls_of(trainer.model)
        losses, norms = run(trainer)
        found[name] = {"losses": losses.tolist(), "norms": norms.tolist(), "rows": sum(rows)}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
