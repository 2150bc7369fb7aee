# Baton's images, one target per service. Build from the repository's root:
#     docker build --target router -t baton-router --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:DIGEST .
# Targets: prefill, decode, router, kvstore. PIP_ARGS goes to pip, e.g. "--extra-index-url $TORCH_CPU_INDEX"
# for a torch without CUDA. Final images have no compiler; router and KV store have no torch. Everything comes by its
# hash: packages as requirements/*.txt have them, the base image by a digest, without which nothing is built.
# `make images` builds all of them, with docker, podman or buildah.
ARG PYTHON_IMAGE

FROM ${PYTHON_IMAGE} AS checked
ARG PYTHON_IMAGE
RUN case "${PYTHON_IMAGE}" in *@sha256:????????????????????????????????????????????????????????????????) ;; \
    *) echo "PYTHON_IMAGE must end with @sha256: and the image's digest (docs/operations.md)" >&2; exit 1 ;; esac

# The wheel: the compiler comes from the package index, since the base image has none.
FROM checked AS wheel
ARG PIP_ARGS=""
WORKDIR /build
COPY requirements requirements
COPY scripts/install_requirements.sh scripts/install_requirements.sh
RUN scripts/install_requirements.sh python build
COPY pyproject.toml hatch_build.py README.md LICENSE NOTICE ./
COPY scripts/build_native.py scripts/build_native.py
COPY native native
COPY models models
COPY src src
COPY services services
COPY kernels kernels
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation -w /wheels .

# Dependencies have layers of their own, which stay when only the code changes. The environment has no pip.
FROM checked AS dependencies
ARG PIP_ARGS=""
WORKDIR /build
COPY requirements requirements
COPY scripts/install_requirements.sh scripts/install_requirements.sh
RUN python -m venv /opt/tools && scripts/install_requirements.sh /opt/tools/bin/python tools
RUN python -m venv --without-pip /opt/baton && scripts/install_requirements.sh /opt/baton/bin/python base otel

FROM dependencies AS light
COPY pyproject.toml ./
COPY native native
COPY scripts/sbom.py scripts/finish_image.sh scripts/
COPY --from=wheel /wheels /wheels
RUN scripts/finish_image.sh

FROM dependencies AS engine
RUN scripts/install_requirements.sh /opt/baton/bin/python engine torch
COPY pyproject.toml ./
COPY native native
COPY scripts/sbom.py scripts/finish_image.sh scripts/
COPY --from=wheel /wheels /wheels
RUN scripts/finish_image.sh

FROM checked AS base
ARG PYTHON_IMAGE
ARG VERSION=""
ARG REVISION=""
LABEL org.opencontainers.image.title="Baton" org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.description="Serves large language models with prefill and decode on separate instances" \
    org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.base.name="${PYTHON_IMAGE}"
RUN groupadd --gid 10001 baton && useradd --uid 10001 --gid 10001 --create-home baton
ENV PATH=/opt/baton/bin:${PATH} PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/baton

FROM base AS worker
COPY --from=engine /opt/baton /opt/baton
ENV BATON_PORT=9000 BATON_METRICS_PORT=9090
# The tcp pipe listens on one more port, which the kernel chooses.
EXPOSE 9000 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD baton health "${BATON_HOST:-127.0.0.1}:${BATON_PORT}"

FROM worker AS prefill
ENTRYPOINT ["baton-prefill"]

FROM worker AS decode
ENTRYPOINT ["baton-decode"]

FROM base AS kvstore
COPY --from=light /opt/baton /opt/baton
ENV BATON_PORT=8200 BATON_METRICS_PORT=9090
# The tcp pipe listens on one more port per kind of KV, which the kernel chooses.
EXPOSE 8200 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD baton health "${BATON_HOST:-127.0.0.1}:${BATON_PORT}"
ENTRYPOINT ["baton-kvstore"]

FROM base AS router
COPY --from=light /opt/baton /opt/baton
ENV BATON_PORT=8000 BATON_GRPC_PORT=8001
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD baton health "${BATON_HOST:-127.0.0.1}:${BATON_GRPC_PORT}"
ENTRYPOINT ["baton-router"]
