"""Run generated code and its tests, in a process that is confined already. Run as a file, with no other module.

    python run_tests.py FD

The standard input has one JSON line: the code, the tests, the folders of installed packages, and a token that marks the
lines written to FD.
"""

import json
import os
import sys
import types


def main() -> None:
    """Run the code, then each test in the same namespace, and write a line for each."""
    replies = int(sys.argv.pop())
    with open(0, closefd=False) as requests:
        job = json.loads(requests.readline())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.set_inheritable(replies, False)  # programs that the code starts do not get it
    sys.path += job["folders"]
    token = job["token"]
    # The code may replace attributes of modules; these names keep the originals.
    say = os.write
    end = os._exit
    dump = json.dumps

    def tell(**fields: object) -> None:
        say(replies, dump({"token": token, **fields}).encode() + b"\n")

    say(replies, b'{"ready": true}\n')
    pid = os.getpid()
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    passed = _runs(job["code"], module)
    for test in job["tests"]:
        passes = passed and _runs(test, module)
        if os.getpid() != pid:  # a copy that the code has forked and not ended
            end(0)
        tell(passed=passes)
    tell()
    end(0)


def _runs(source: str, module: types.ModuleType) -> bool:
    """Return whether a piece of code runs without an exception."""
    try:
        exec(compile(source, "answer.py", "exec"), module.__dict__)
    except BaseException:  # SystemExit too
        return False
    return True


if __name__ == "__main__":
    main()
