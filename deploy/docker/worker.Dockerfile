# A worker with the torch engine, and the demo model baked in. Build from the project's root:
#   docker build -f deploy/docker/worker.Dockerfile -t antiphon-worker:0.1.0 .
# For another build of torch name its wheel index: --build-arg TORCH_INDEX=<address>
ARG PYTHON=python:3.11.14-slim-bookworm
FROM ${PYTHON} AS build
ARG TORCH_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/antiphon
RUN /opt/antiphon/bin/pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
COPY . /source
RUN /opt/antiphon/bin/pip install "/source[worker]" \
 && /opt/antiphon/bin/pip install --no-deps nixl-cu12==1.5.1
RUN ANTIPHON_CACHE_DIR=/opt/antiphon/cache /opt/antiphon/bin/antiphon prepare demo

FROM ${PYTHON}
# The engine compiles its kernels for the CPU that it finds.
RUN apt-get update && apt-get install -y --no-install-recommends g++ ca-certificates && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 antiphon && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home antiphon
COPY --from=build /opt/antiphon /opt/antiphon
ENV PATH=/opt/antiphon/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=antiphon \
    ANTIPHON_CACHE_DIR=/opt/antiphon/cache TORCH_EXTENSIONS_DIR=/tmp/torch_extensions
USER 10001:10001
ENTRYPOINT ["antiphon"]
CMD ["worker"]
