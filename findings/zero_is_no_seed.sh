#!/usr/bin/env bash
# A generator of NumPy that is seeded with [seed, 0] draws the numbers of the one that is seeded with the seed alone.
#
# Guess: default_rng(7), default_rng([7, 0]) and default_rng([7, 0, 0]) are three streams, as default_rng([7, 1]) is another.
# Behaviour: the words of a seed fill a pool of four words, and what is left of the pool is zero. So zeros at the end of a
#   short list change nothing: all three are one stream. Numbers are cut into words of 32 bits, so [7, 1] is also the
#   stream of the single number 7 + 2^32. A zero in the fifth place, or in front, makes a stream of its own. spawn_key
#   keeps all of them apart.
# Packages: numpy 2.4.6
# Why it matters: where the whole job draws with (seed), an epoch with (seed, epoch) and a rank with (seed, epoch, rank),
#   rank 0 of epoch 0 repeats what the job drew. Its noise, masks or order are not independent of the others', and only
#   the first rank of the first epoch shows it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check numpy==2.4.6

venv/bin/python - <<'PY'
import numpy as np

print("version: numpy", np.__version__)
print("guess: each list of numbers has a stream of its own")


def draw(seed):
    return tuple(np.random.default_rng(seed).permutation(1000)[:8].tolist())


job, epoch, rank, other = draw(7), draw([7, 0]), draw([7, 0, 0]), draw([7, 0, 1])
print(f"seen: the job draws {job}")
print(f"seen: epoch 0 draws {epoch}, its rank 0 {rank}, its rank 1 {other}")
print(f"seen: [7, 1] draws {draw([7, 1])}, 7 + 2^32 draws {draw(7 + 2**32)}")
assert job == epoch == rank != other
assert draw([7, 1]) == draw(7 + 2**32)
assert draw([7, 0, 0, 0]) == job != draw([7, 0, 0, 0, 0]) and draw([0, 7]) != job
keys = [np.random.SeedSequence(7, spawn_key=key) for key in ((), (0,), (0, 0), (0, 1))]
print(f"seen: with spawn_key there are {len({draw(key) for key in keys})} streams of {len(keys)}")
assert len({draw(key) for key in keys}) == len(keys)
PY
