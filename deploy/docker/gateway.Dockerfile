# The gateway: no torch. Build from the project's root:
#   docker build -f deploy/docker/gateway.Dockerfile -t antiphon-gateway:0.1.0 .
ARG PYTHON=python:3.11.14-slim-bookworm
FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/antiphon
COPY . /source
RUN /opt/antiphon/bin/pip install "/source[gateway]" && /opt/antiphon/bin/python -m compileall -q /opt/antiphon

FROM ${PYTHON}
RUN groupadd --gid 10001 antiphon && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home antiphon
COPY --from=build /opt/antiphon /opt/antiphon
ENV PATH=/opt/antiphon/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=antiphon
USER 10001:10001
ENTRYPOINT ["antiphon"]
CMD ["gateway", "--host", "0.0.0.0"]
