# Lockstep on NVIDIA GPUs: torch's wheels bring CUDA 13; the host needs its driver and the NVIDIA container toolkit.
#   docker build -t lockstep .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -v $PWD/runs:/lockstep/runs lockstep \
#       accelerate launch train.py --config configs/smollm2_arith.yaml
FROM python:3.12-slim

# gcc: Triton and torch.compile build small C files. git: the commit that a run's configuration names.
RUN apt-get update && apt-get install -y --no-install-recommends build-essential git && rm -rf /var/lib/apt/lists/*
WORKDIR /lockstep
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
RUN git config --system --add safe.directory /lockstep
ENV VLLM_USE_FLASHINFER_SAMPLER=0
CMD ["python", "-m", "look.selftest"]
