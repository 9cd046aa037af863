"""Loading, verifying and listing a commit unpickles nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.pieces import full_piece

CODE = """
import sys
seen = []
sys.addaudithook(lambda event, args: seen.append(event) if event.startswith("pickle.") else None)
from orchestrator.checkpoint.retention import Retention, prune
from orchestrator.checkpoint.commit_store import Store
store = Store(sys.argv[1])
armed = len(seen)
found = store.latest()
reader = store.reader(found)
read = [reader.read(name) for name in found.tensors]
assert store.verify(found.step) == [] and store.steps() == [1] and prune(store, Retention(1)) == []
print(len(read), len(seen) - armed)
import collections, pickle
pickle.loads(pickle.dumps(collections.OrderedDict()))
print(len(seen) > armed)
"""


def test_nothing_is_unpickled(in_memory: Path) -> None:
    """Asked for in prime-rl#821."""
    store = Store(str(in_memory))
    tensors = [full_piece("model.w", torch.ones(3)), full_piece("optim.w.step", torch.tensor(1.0))]
    store.publish(1, store.write_shard(1, 0, tensors), {"position": 0, "receipt": ""})
    command = [sys.executable, "-c", CODE, str(in_memory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # two tensors read, no unpickling; and the hook does see one where there is one
    assert done.stdout.split() == ["2", "0", "True"]
