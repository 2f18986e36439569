# Image of titanlite for clusters:  docker build --tag titanlite .
#
# Packages have the versions of constraints.txt. The user is not root. Nothing is downloaded when a container starts.
FROM python:3.11-slim-bookworm

# A compiler, for torch.compile; git, for the commit in run.json.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 titanlite
WORKDIR /opt/titanlite
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt --editable ".[float8,tokenizers,data,s3,gcs]" \
    && git config --system --add safe.directory /opt/titanlite

USER titanlite
WORKDIR /home/titanlite
CMD ["/opt/titanlite/run_train.sh"]
