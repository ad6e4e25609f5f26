"""Why weights cannot be fetched, told to the person who wrote the Model."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator

from antiphon_telemetry.exit import ExitCode


class FetchError(Exception):
    """The weights cannot be had. The message says what to do next."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextlib.contextmanager
def explained(repository: str, revision: str, endpoint: str) -> Iterator[None]:
    """Turn what the hub's client raises into a FetchError that names the field to look at."""
    import httpx2
    from huggingface_hub import errors

    secret = "spec.source.secretRef (a Secret whose key `token` holds an access token)"
    try:
        yield
    except FetchError:
        raise
    except errors.GatedRepoError as error:
        raise FetchError(
            f"{repository} is gated: accept its terms on {endpoint}, and name the token of that account in {secret}",
            ExitCode.BAD_INPUT,
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FetchError(
            f"no such revision {revision!r} of {repository}: name a branch, tag or commit of it in "
            "spec.source.revision",
            ExitCode.BAD_INPUT,
        ) from error
    except errors.RepositoryNotFoundError as error:
        # Without a token the hub does not tell what is private from what is not there.
        advice = (
            "correct spec.source.uri, or let the account of spec.source.secretRef read it"
            if os.environ.get("HF_TOKEN")
            else f"correct spec.source.uri or, if it is private, name a token in {secret}"
        )
        raise FetchError(f"no such model {repository} on {endpoint}: {advice}", ExitCode.BAD_INPUT) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise FetchError(
                f"{endpoint} refuses the token for {repository} ({status}): name one that may read it in {secret}",
                ExitCode.BAD_INPUT,
            ) from error
        raise FetchError(
            f"{endpoint} answers {status} for {repository}: it will be tried again", ExitCode.UNAVAILABLE
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise _no_network(endpoint, error.__cause__ or error) from error
    except ssl.SSLError as error:
        raise FetchError(
            f"no certificates can be read from {os.environ.get('SSL_CERT_FILE')} ({error}): correct spec.caBundle",
            ExitCode.BAD_INPUT,
        ) from error
    except OSError as error:
        if error.errno is None:  # raised by the client, not by the file system
            raise _no_network(endpoint, error) from error
        raise FetchError(f"the weights cannot be written: {error}", ExitCode.FAILURE) from error
    except (httpx2.HTTPError, errors.XetDownloadError) as error:
        raise _no_network(endpoint, error) from error


def _no_network(endpoint: str, cause: BaseException) -> FetchError:
    return FetchError(
        f"{endpoint} cannot be reached ({type(cause).__name__}: {cause}): check the cluster's egress, spec.proxy and "
        "spec.caBundle, or HF_ENDPOINT",
        ExitCode.UNAVAILABLE,
    )
