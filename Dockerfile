# penstock serve as an unprivileged user. Every package is checked against the hashes in requirements/container.txt.
# Build: docker build -t penstock .    Run: docker run --gpus all -p 8000:8000 -v "$PWD/my-model:/model:ro" penstock
# To pin the base image by its content: --build-arg BASE=python@sha256:…
ARG BASE=python:3.12.12-slim-bookworm

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/penstock
COPY requirements/container.txt /src/requirements/container.txt
# An image with torch for CPUs needs its index as well: --build-arg EXTRA_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRA_INDEX=
RUN PIP_EXTRA_INDEX_URL="${EXTRA_INDEX}" /opt/penstock/bin/pip install \
    --require-hashes --no-deps --only-binary :all: -r /src/requirements/container.txt
COPY pyproject.toml README.md LICENSE /src/
COPY penstock /src/penstock
RUN /opt/penstock/bin/pip install --no-deps --no-build-isolation /src && /opt/penstock/bin/pip check

FROM ${BASE}
RUN useradd --system --uid 10001 --create-home --shell /usr/sbin/nologin penstock
COPY --from=build /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER 10001
WORKDIR /home/penstock
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["penstock"]
CMD ["serve", "/model", "--host", "0.0.0.0"]
