#define CHORALE_ISA "isa/avx2.h"
#define CHORALE_TABLE table_avx2
#include "kernels.inc"
