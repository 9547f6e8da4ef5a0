# Sourced by the scripts that train or decode: the virtual environment, and how memory is handled on a CPU.
export PATH="$PWD/.venv/bin:$PATH" TOKENIZERS_PARALLELISM=false
# Large temporaries cost page faults in every step: keep freed memory in the process, and take it in huge pages (glibc).
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=500000000
