#define CHORALE_ISA "isa/neon.h"
#define CHORALE_TABLE table_neon
#include "kernels.inc"
