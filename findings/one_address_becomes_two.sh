#!/usr/bin/env bash
# datatrove's formatter for personal data replaces one address by different ones, and different addresses by the same.
#
# Guess: a replacement is a function of what is replaced, so a page that names one mail address twice names one address
#   afterwards, and two runs over the same documents give the same text.
# Behaviour: the formatter deals its list of replacements in turns, over all matches of the process. One sender becomes
#   two people within a sentence, and the address that a server has depends on how many addresses the documents before it
#   held, so on the order of the documents and the number of workers.
# Packages: datatrove 0.10.1 with regex 2026.11.15 and numpy 2.4.6
# Why it matters: threads of mail and logs of servers lose who is who; a corpus that is made again, or divided otherwise,
#   has other bytes, and deduplication by hash after it keeps copies.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check datatrove==0.10.1 numpy==2.4.6 regex==2026.11.15

venv/bin/python - <<'PY'
import importlib.metadata

from datatrove.pipeline.formatters import PIIFormatter

print("version: datatrove", importlib.metadata.version("datatrove"))
print("guess: the sender stays one address, and a log line gives the same text each time")
formatter = PIIFormatter()
mail = formatter.format("sender@firm.com wrote, and sender@firm.com wrote again")
logs = [formatter.format("host 8.8.8.8 is up") for _ in range(2)]
print(f"seen: {mail!r}; the same line twice: {logs}")
first, second = (word for word in mail.split() if "@" in word)
assert first != second
assert logs[0] != logs[1]
PY
