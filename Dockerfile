# With a GPU:     docker build -t halftune .
#                 docker run --rm --gpus all --ipc=host -v "$PWD":/workspace --user "$(id -u)" halftune train --config qwen_lora_bf16
# Without one:    docker build -t halftune --build-arg BASE=ubuntu:24.04 --build-arg LOCK=cpu \
#                     --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's index of CPU wheels> .
ARG BASE=nvidia/cuda:13.0.2-base-ubuntu24.04
FROM ${BASE}

# Triton compiles its launchers with a C compiler and Python's headers; torch.compile compiles C++ for CPUs
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv python3-dev gcc g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 halftune \
    && mkdir /workspace && chown halftune /workspace

ARG LOCK=cuda13
ARG PIP_EXTRA_INDEX_URL
ENV PATH=/opt/halftune/bin:$PATH
COPY locks/${LOCK}.txt /tmp/lock.txt
RUN python3 -m venv /opt/halftune && pip install --no-cache-dir --require-hashes -r /tmp/lock.txt

COPY . /tmp/halftune
RUN pip install --no-cache-dir --no-deps /tmp/halftune

# Any user may run it (docker run --user "$(id -u)"): caches lie in a home that everyone can write
ENV HOME=/home/halftune
RUN chmod 1777 "$HOME"
USER halftune
WORKDIR /workspace
EXPOSE 7860
ENTRYPOINT ["halftune"]
CMD ["--help"]
