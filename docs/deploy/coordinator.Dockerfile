# A coordinator, without CUDA. Build from the repository:
#   docker build -f docs/deploy/coordinator.Dockerfile -t atoll-coordinator .
# The volume holds the keys of the run: back up /state/keys.json.
#   docker run -d --restart on-failure -p 7700:7700 -p 7701:7701 -v atoll-run:/state \
#     -v $PWD/RUN.toml:/RUN.toml:ro atoll-coordinator /RUN.toml --advertise HOST
FROM python:3.12-slim
COPY . /source
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    "/source[data]" && rm -r /source
VOLUME /state
EXPOSE 7700 7701
STOPSIGNAL SIGTERM
ENTRYPOINT ["atoll", "coordinator", "--state-dir", "/state"]
CMD ["/RUN.toml"]
