/* Codes of four bits: tables of 16 values, and integers of 16 bits that represent them */
#pragma once
#include "blocks.h"

#define CODE_PEAK 32767 /* integer of the largest code */

/* Layouts of CODE4: that of other integers if an instruction looks words up, else one for two tables of bytes */
#if WORD_CODES
typedef struct {
    vi values; /* words, repeated: the upper bit of five is ignored */
} lookup;

INLINE lookup read_codes(const uint8_t *bytes) {
    lookup t;
    for (int i = 0; i < 32; i++) {
        uint16_t word = bytes[i % 16] | bytes[16 + i % 16] << 8;
        memcpy((char *)&t.values + 2 * i, &word, sizeof word);
    }
    return t;
}
INLINE vi look_up(const lookup *t, vi words) { /* by the lower four bits */
    return (vi)_mm512_permutexvar_epi16((__m512i)words, (__m512i)t->values);
}
#else
typedef struct {
    vb low, high;
} lookup; /* bytes of the 16 values, repeated every 16 bytes */

INLINE lookup read_codes(const uint8_t *bytes) {
    lookup t;
    for (int i = 0; i < 4 * LANES; i += 16)
        memcpy((char *)&t.low + i, bytes, 16), memcpy((char *)&t.high + i, bytes + 16, 16);
    return t;
}

/* table[index], and the values (low, high) of the lower and upper half of every 16 bytes */
#if defined(__AVX2__)
INLINE vb look_up(vb table, vb index) { return (vb)_mm256_shuffle_epi8((__m256i)table, (__m256i)index); }
INLINE vi lower(vb low, vb high) { return (vi)_mm256_unpacklo_epi8((__m256i)low, (__m256i)high); }
INLINE vi upper(vb low, vb high) { return (vi)_mm256_unpackhi_epi8((__m256i)low, (__m256i)high); }
#elif defined(__aarch64__)
INLINE vb look_up(vb table, vb index) { return (vb)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index); }
INLINE vi lower(vb low, vb high) { return (vi)vzip1q_u8((uint8x16_t)low, (uint8x16_t)high); }
INLINE vi upper(vb low, vb high) { return (vi)vzip2q_u8((uint8x16_t)low, (uint8x16_t)high); }
#else
INLINE vb look_up(vb table, vb index) {
    vb out;
    for (int i = 0; i < 4 * LANES; i++) out[i] = table[index[i]];
    return out;
}
INLINE vi half_of(vb low, vb high, int first) {
    vb out;
    for (int i = 0; i < 4 * LANES; i++) out[i] = (i % 2 ? high : low)[i / 16 * 16 + first + i % 16 / 2];
    return (vi)out;
}
INLINE vi lower(vb low, vb high) { return half_of(low, high, 0); }
INLINE vi upper(vb low, vb high) { return half_of(low, high, 8); }
#endif
#endif
