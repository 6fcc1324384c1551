# A peer. Build from the repository: docker build -f docs/deploy/peer.Dockerfile -t atoll-peer .
# Start it once in a terminal and answer its question; the answer is kept in the volume:
#   docker run -it --gpus all -v atoll-peer:/state -v $PWD/invite:/invite:ro atoll-peer
# Later, in the background:
#   docker run -d --restart on-failure --gpus all -v atoll-peer:/state \
#     -v $PWD/invite:/invite:ro atoll-peer
# Without a GPU, omit --gpus.
FROM python:3.12-slim
COPY . /source
RUN pip install --no-cache-dir "/source[data]" && rm -r /source
VOLUME /state
STOPSIGNAL SIGTERM
ENTRYPOINT ["atoll", "peer", "--state-dir", "/state"]
CMD ["/invite"]
