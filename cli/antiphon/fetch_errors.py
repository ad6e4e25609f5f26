"""Why weights cannot be fetched, told to the person who wrote the Model, or who named it on the command line."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

from antiphon_telemetry.exit import ExitCode


class FetchError(Exception):
    """The weights cannot be had. The message says what to do next."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Wording:
    """What the person who is told can change, in their own words."""

    uri: str
    revision: str
    token: str
    account: str
    """Whose token it is."""
    certificates: str
    network: str
    room: str


MODEL = Wording(
    uri="spec.source.uri",
    revision="spec.source.revision",
    token="spec.source.secretRef (a Secret whose key `token` holds an access token)",
    account="the account of spec.source.secretRef",
    certificates="spec.caBundle",
    network="the cluster's egress, spec.proxy and spec.caBundle, or HF_ENDPOINT",
    room="make the claim larger, or raise spec.source.cache.size on nodes with larger disks",
)
"""For whoever wrote a Model."""

COMMAND = Wording(
    uri="the name after hf://",
    revision="the revision after the @",
    token="the environment variable HF_TOKEN",
    account="the account of HF_TOKEN",
    certificates="SSL_CERT_FILE",
    network="the network, HTTPS_PROXY, SSL_CERT_FILE and HF_ENDPOINT",
    room="make room, or choose a folder on a larger disk with --cache-dir",
)
"""For whoever said `antiphon serve hf://org/name`."""


@contextlib.contextmanager
def explained(repository: str, revision: str, endpoint: str, wording: Wording) -> Iterator[None]:
    """Turn what the hub's client raises into a FetchError that names what to look at."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except FetchError:
        raise
    except errors.GatedRepoError as error:
        raise FetchError(
            f"{repository} is gated: accept its terms on {endpoint}, and name the token of that account in "
            f"{wording.token}",
            ExitCode.BAD_INPUT,
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FetchError(
            f"no such revision {revision!r} of {repository}: name a branch, tag or commit of it in {wording.revision}",
            ExitCode.BAD_INPUT,
        ) from error
    except errors.RepositoryNotFoundError as error:
        # Without a token the hub does not tell what is private from what is not there.
        advice = (
            f"correct {wording.uri}, or let {wording.account} read it"
            if os.environ.get("HF_TOKEN")
            else f"correct {wording.uri} or, if it is private, name a token in {wording.token}"
        )
        raise FetchError(f"no such model {repository} on {endpoint}: {advice}", ExitCode.BAD_INPUT) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise FetchError(
                f"{endpoint} refuses the token for {repository} ({status}): name one that may read it in "
                f"{wording.token}",
                ExitCode.BAD_INPUT,
            ) from error
        raise FetchError(
            f"{endpoint} answers {status} for {repository}: it will be tried again", ExitCode.UNAVAILABLE
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise _no_network(endpoint, error.__cause__ or error, wording) from error
    except ssl.SSLError as error:
        raise FetchError(
            f"no certificates can be read from {os.environ.get('SSL_CERT_FILE')} ({error}): correct "
            f"{wording.certificates}",
            ExitCode.BAD_INPUT,
        ) from error
    except OSError as error:
        if error.errno is None:  # raised by the client, not by the file system
            raise _no_network(endpoint, error, wording) from error
        raise FetchError(f"the weights cannot be written: {error}", ExitCode.FAILURE) from error
    except (httpx2.HTTPError, errors.XetDownloadError) as error:
        raise _no_network(endpoint, error, wording) from error


def _no_network(endpoint: str, cause: BaseException, wording: Wording) -> FetchError:
    return FetchError(
        f"{endpoint} cannot be reached ({type(cause).__name__}: {cause}): check {wording.network}",
        ExitCode.UNAVAILABLE,
    )
