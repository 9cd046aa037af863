"""Publish an export on the Hugging Face Hub, or on a server that HF_ENDPOINT names."""

from __future__ import annotations

import json
from pathlib import Path

from orchestrator.config.errors import InputError
from orchestrator.config.redact import redact_message
from orchestrator.export.target import MARK
from orchestrator.storage.uri import is_local, local_path

WHERE = "--push"
FORM = "write it as USER/NAME"


def check_push(repo: str, target: str, where: str = WHERE, needs_token: bool = True) -> None:
    """Raise InputError if an export to `target` cannot be pushed: before anything is computed.

    Args:
        repo: the repository.
        target: the folder of the export.
        where: what names the repository, for messages.
        needs_token: whether this process must have a token; not if another machine pushes.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        why = " ".join(str(error).split())
        raise InputError(f"is not a repository of the Hub ({why})", f"{where} {repo}", FORM) from None
    if "/" not in repo:
        raise InputError("is not a repository of the Hub", f"{where} {repo}", FORM)
    if not is_local(target):
        key = "--to" if where == WHERE else "checkpoint.export_to, or the run directory,"
        raise InputError(
            "only a folder, not a store, is pushed", where, f"give {key} a folder, or leave it out"
        )
    if needs_token and not get_token():
        raise InputError("there is no token of the Hub", where, "set HF_TOKEN, or run `hf auth login`")


def push(folder: str, repo: str, private: bool, must_be_private: bool = False) -> str:
    """Upload a checked export, and return its address. A repository that is not there is made.

    Files of an earlier push that the export does not have stay. The token comes from the environment.

    Args:
        folder: the export.
        repo: the repository, USER/NAME.
        private: whether a repository that is made is private. One that is there stays as it is.
        must_be_private: whether a repository that is there and public is refused.

    Raises:
        InputError: there is no export, or the Hub refuses the token or the repository, or it is public.
        RuntimeError: the Hub does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    check_push(repo, folder)
    local = Path(local_path(folder))
    if not (local / MARK).is_file():
        raise InputError("holds no finished export", folder, "export the checkpoint again")
    facts = json.loads((local / MARK).read_text())
    message = f"Step {facts['step']} of {facts['run']}"
    api = HfApi()
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        # The Hub leaves a repository that is there as it is.
        if must_be_private and not api.repo_info(repo).private:
            hint = "make it private in its settings, or name another"
            raise InputError("is public, and only a private repository is pushed to", repo, hint)
        api.upload_folder(
            repo_id=repo, folder_path=local, commit_message=message, allow_patterns=list(facts["files"])
        )
    except HfHubHTTPError as error:
        line = redact_message(" ".join(str(error).split()))[:300]
        status = error.response.status_code if error.response is not None else 0
        if status in (400, 401, 403, 404, 409):
            raise InputError(
                f"the Hub refused the upload ({line})", f"{WHERE} {repo}", "check the token's rights"
            ) from None
        raise RuntimeError(f"the Hub did not accept {repo} ({line}); the export is in {folder}") from None
    except InputError:
        raise
    except Exception as error:  # each version of huggingface_hub has the errors of another HTTP library
        line = redact_message(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
        raise RuntimeError(f"the Hub did not accept {repo} ({line}); the export is in {folder}") from None
    return str(address)
