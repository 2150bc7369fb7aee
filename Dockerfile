# Baton's images, one target per service. Build from the repository's root:
#     docker build --target router -t baton-router .
# Targets: prefill, decode, router, kvstore. PIP_ARGS goes to pip, e.g. "--extra-index-url https://download.pytorch.org/whl/cpu"
# for a torch without CUDA. Final images have no compiler; router and KV store have no torch.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# The wheel: the compiler comes from the package index, since the base image has none.
FROM ${PYTHON_IMAGE} AS wheel
ARG PIP_ARGS=""
WORKDIR /build
COPY pyproject.toml hatch_build.py README.md LICENSE NOTICE ./
COPY scripts/build_native.py scripts/build_native.py
COPY native native
COPY models models
COPY src src
COPY services services
COPY kernels kernels
RUN pip wheel --no-cache-dir --no-deps ${PIP_ARGS} -w /wheels .

# Dependencies have layers of their own, which stay when only the code changes.
FROM ${PYTHON_IMAGE} AS dependencies
ARG PIP_ARGS=""
WORKDIR /build
RUN python -m venv /opt/baton
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > requirements.txt \
    && /opt/baton/bin/pip install --no-cache-dir ${PIP_ARGS} -c constraints.txt -r requirements.txt

FROM dependencies AS light
COPY --from=wheel /wheels /wheels
RUN /opt/baton/bin/pip install --no-cache-dir --no-deps /wheels/*.whl && /opt/baton/bin/pip check

FROM dependencies AS engine
RUN python -c "import tomllib; x = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; print(*x['engine'], *x['nixl'], sep='\n')" \
        > engine.txt \
    && /opt/baton/bin/pip install --no-cache-dir ${PIP_ARGS} -c constraints.txt -r engine.txt
COPY --from=wheel /wheels /wheels
RUN /opt/baton/bin/pip install --no-cache-dir --no-deps /wheels/*.whl && /opt/baton/bin/pip check

FROM ${PYTHON_IMAGE} AS base
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
