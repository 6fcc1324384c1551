"""A model on the Hugging Face hub: a repository of its owner's, private unless he says otherwise.

The hub's own library does it, with the token and the address that its settings have
(`hf auth login`, `HF_TOKEN`, `HF_ENDPOINT`).
"""

from __future__ import annotations

from pathlib import Path

from atoll.peer.extras import extra
from atoll.peer.training.one_file import ExportError

PURPOSE = "--push"


def expect_can_push(repo: str) -> None:
    """Refuse what would fail after the export: a wrong name, no token, or no hub.

    Raises:
        ExportError: with the remedy.
        ExtraMissing: `huggingface_hub` is not installed.
    """
    errors = extra("huggingface_hub.errors", PURPOSE)
    try:
        extra("huggingface_hub.utils", PURPOSE).validate_repo_id(repo)
        is_name = repo.count("/") == 1
    except errors.HFValidationError:
        is_name = False
    if not is_name:
        raise ExportError(f"--push: expected OWNER/NAME of a model of the hub, got {repo!r}")
    try:
        extra("huggingface_hub", PURPOSE).HfApi().whoami()
    except errors.LocalTokenNotFoundError:
        raise ExportError(
            "--push: there is no token of the hub on this machine; log in with `hf auth login`, or "
            "set HF_TOKEN"
        ) from None
    except Exception as error:
        raise _refused(error) from None


def push(path: Path, repo: str, *, message: str, is_public: bool = False) -> str:
    """Upload a folder or a file as one commit; return its address.

    Args:
        path: what was exported; of a file the repository gets a file of that name.
        repo: OWNER/NAME, which is made if it does not exist.
        message: of the commit.
        is_public: whether a repository that is made can be read by everybody. One that exists
            stays what it is.

    Raises:
        ExportError: the hub refuses, or cannot be reached; what was exported stays.
    """
    api = extra("huggingface_hub", PURPOSE).HfApi()
    try:
        api.create_repo(repo, private=not is_public, exist_ok=True)
        if path.is_dir():
            told = api.upload_folder(repo_id=repo, folder_path=path, commit_message=message)
        else:
            told = api.upload_file(
                path_or_fileobj=path, path_in_repo=path.name, repo_id=repo, commit_message=message
            )
    except Exception as error:
        raise _refused(error, kept=path) from None
    return str(told.commit_url)


def _refused(error: Exception, *, kept: Path | None = None) -> ExportError:
    """Return what the hub, or the way to it, has against it. Raises any other error."""
    there = f"; the export is in {kept}" if kept is not None else ""
    if isinstance(error, extra("huggingface_hub.errors", PURPOSE).HfHubHTTPError):
        status = getattr(getattr(error, "response", None), "status_code", None)
        why = getattr(error, "server_message", None) or f"answer {status}"
        login = "log in with a token that may write there (`hf auth login`, or HF_TOKEN)"
        remedy = login if status in (401, 403) else "try again"
        return ExportError(f"--push: the hub refuses: {why}; {remedy}{there}")
    if isinstance(error, OSError | TimeoutError) or type(error).__module__.startswith("http"):
        return ExportError(f"--push: the hub cannot be reached: {error}; try again{there}")
    raise error
